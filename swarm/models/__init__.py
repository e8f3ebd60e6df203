"""What the learner and the samplers both need of a model."""
