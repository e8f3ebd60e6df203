"""Which fleet to rent or admit for a scenario, before there is a swarm."""
