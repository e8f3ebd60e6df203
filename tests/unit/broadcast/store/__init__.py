"""Tests of swarm/broadcast/store."""
