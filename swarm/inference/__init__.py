"""The swarm as an inference endpoint: people and others' environments ask the current policy for completions."""
