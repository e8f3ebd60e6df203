"""The run on disk: write it in order, read it back, verify, export and salvage it."""
