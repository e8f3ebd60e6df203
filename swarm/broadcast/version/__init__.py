"""What a version of the weights is: its manifest, and how its regions are coded."""
