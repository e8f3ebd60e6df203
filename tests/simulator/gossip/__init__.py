"""Membership of thousands of simulated nodes."""
