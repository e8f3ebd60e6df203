"""How weights get from the learner to every sampler: regions, chunks, signed manifests, the memory-mapped copy."""
