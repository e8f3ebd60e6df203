"""How a version reaches many receivers: in stripes, each of which goes down its own tree."""
