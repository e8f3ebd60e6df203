"""Whether samplers did what they were asked to: pure, fed by the learner with what it computes."""
