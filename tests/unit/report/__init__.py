"""Tests of swarm/report."""
