"""Stands in for the trainer in tests of launcher and supervisor: the same channel, no torch, so
that it starts at once.
"""
