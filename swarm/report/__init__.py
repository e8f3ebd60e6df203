"""What a run directory tells afterwards, or meanwhile: its figures as one HTML page, its model's card. Only reads."""
