"""The swarm on a virtual clock: the real cores, seeded links and crashes, invariants checked after every event."""
