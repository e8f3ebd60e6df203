"""Rings of tests: unit, property, simulation, integration, browser, netns, vllm, gpu."""
