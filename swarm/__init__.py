"""echo-node: one learner, many cheap samplers, over the open internet."""

__version__ = "0.1.0"
