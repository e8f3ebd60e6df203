"""Tests of swarm/learner."""
