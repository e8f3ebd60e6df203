"""Tests of swarm/learner/checkpoint."""
