"""Tests of swarm/net."""
