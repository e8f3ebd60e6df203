"""echo-node: one learner, many cheap samplers, over the open internet."""

__version__ = "0.1.0"

SOURCE = "<this repository>"
"""Where it can be cloned from: its owner fills it in here and in the two documents that a test compares with this."""
