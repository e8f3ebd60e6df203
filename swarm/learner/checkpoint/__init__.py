"""Models and checkpoints as directories."""
