"""Tests of swarm/broadcast/forest."""
