"""Claims about all inputs, tried on drawn ones (hypothesis)."""
