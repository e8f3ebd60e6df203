"""What people look at: the live view in a terminal, and pictures of a run."""
