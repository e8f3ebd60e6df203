"""An engine over mlx-lm: for Apple silicon, and its CPU build for tests."""
