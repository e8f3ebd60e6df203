"""Tests of swarm/sampler."""
