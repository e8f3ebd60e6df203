"""Capacity and cost: how many samplers, which ones, and what a step costs (docs/capacity.md)."""
