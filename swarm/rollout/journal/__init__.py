"""The run on disk: written in order, read back, verified, exported, salvaged."""
