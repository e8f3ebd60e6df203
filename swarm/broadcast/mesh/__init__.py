"""How a version reaches at most 32 receivers: each chunk is dealt to one of them, which sends it to the others."""
