"""The learning plane: GRPO steps in a process of their own."""
