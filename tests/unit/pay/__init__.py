"""Tests of swarm/pay."""
