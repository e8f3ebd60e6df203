"""Tests of swarm/rollout/plane."""
