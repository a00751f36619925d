"""The sections of a preset, a module for each. ``types.RunSpec`` puts them together."""
