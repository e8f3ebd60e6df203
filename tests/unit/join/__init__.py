"""Tests of swarm/node."""
