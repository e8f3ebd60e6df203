"""The rollout plane: leases, admission under the staleness bound, and the buffer that batches come from."""
