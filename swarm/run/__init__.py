"""A run directory: what lies where, its log, its prompts and its timeline."""
