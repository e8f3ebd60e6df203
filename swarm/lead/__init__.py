"""How a run is led: the learner, its steps, training, publication, answers, samplers and signals."""
