"""The sampler: an engine child that generates, and the worker that feeds it."""
