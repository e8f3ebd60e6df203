"""The rollout plane: leases, admission against the staleness bound, the buffer that batches are taken from."""
