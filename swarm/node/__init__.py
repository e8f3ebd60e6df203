"""What every node is: its network, its identity, how it greets others and how its owner controls it."""
