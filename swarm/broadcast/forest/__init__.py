"""The way of a version to many receivers: stripes, each down a tree of its own."""
