"""Tests of swarm/broadcast/version."""
