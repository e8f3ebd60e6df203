"""The commands. Nothing here imports torch or numpy, so that `echo-node --help` answers at once."""
