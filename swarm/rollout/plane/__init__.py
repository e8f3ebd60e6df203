"""Pure decisions: which node may generate what, which answers count, and when a batch is ready."""
