"""Tests of swarm/rollout/journal."""
