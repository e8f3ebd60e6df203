"""Checks that samplers did what they were asked to, by drawing some of their rollouts again."""
