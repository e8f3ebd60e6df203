"""Unit tests of swarm/environments/."""
