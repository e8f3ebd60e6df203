"""Composition roots: they assemble a node of each role from the shells."""
