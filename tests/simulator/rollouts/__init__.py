"""A learner and its samplers: leases, batches, crashes and recovery."""
