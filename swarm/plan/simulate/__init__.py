"""A whole swarm on a virtual clock, with the real decisions: what `echo-node simulate` runs."""
