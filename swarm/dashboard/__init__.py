"""The live page of a run: its server, what it shows, and how it is told to many who look. Above the node."""
