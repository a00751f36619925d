"""Stands in for the trainer: the same channel, no torch, so that it starts at once."""
