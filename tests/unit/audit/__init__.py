"""Tests of swarm/audit."""
