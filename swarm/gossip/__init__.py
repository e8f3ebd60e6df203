"""Membership: who is in the swarm, where they listen, what they hold, and which version is the newest."""
