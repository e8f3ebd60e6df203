"""Rings of tests: unit, property, simulation, integration, netns, gpu."""
