"""Tests of swarm/cli."""
