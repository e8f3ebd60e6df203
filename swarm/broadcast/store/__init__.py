"""Versions and weights on a node's disk."""
