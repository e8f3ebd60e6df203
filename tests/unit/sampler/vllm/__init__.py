"""Tests of swarm/sampler/vllm."""
