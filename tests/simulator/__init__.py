"""The cores on a virtual clock, with seeded links and crashes; invariants are checked after every event."""
