"""Transfers of a version between simulated nodes."""
