"""Tests of swarm/tasks."""
