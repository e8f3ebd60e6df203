"""One claim a test, no process but this one, no waiting by the clock."""
