"""Worlds that answer a model turn by turn: games, puzzles and tools. They know nothing of tokens or of the swarm."""
