"""Somebody's machine in a swarm: relay or sampler, and what its owner allows."""
