"""Tests of swarm/gossip."""
