"""The commands. Nothing here imports torch or numpy: `echo-node --help` answers at once."""
