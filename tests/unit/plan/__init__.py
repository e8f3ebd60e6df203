"""Tests of swarm/plan."""
