"""Tests of swarm/join."""
