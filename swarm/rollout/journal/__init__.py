"""The run on disk: write it in order, read it back, verify and export it."""
