"""Attackers as real nodes against a real learner: what each does, who caught it, and what it cost the run."""
