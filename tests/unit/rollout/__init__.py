"""Tests of swarm/rollout."""
