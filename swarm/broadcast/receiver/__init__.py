"""A receiver's side of the broadcast: versions are opened, followed, and put into the weight map."""
