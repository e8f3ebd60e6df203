"""Composition roots: a node of each role, put together from the shells."""
