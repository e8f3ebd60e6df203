"""Tests of swarm/broadcast."""
