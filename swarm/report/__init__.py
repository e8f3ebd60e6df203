"""What a status and a run directory say, for people: words and figures, the terminal, pictures, the model's card."""
