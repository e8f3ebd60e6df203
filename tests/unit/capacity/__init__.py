"""Tests of swarm/capacity."""
