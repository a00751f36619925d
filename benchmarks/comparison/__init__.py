"""What ``benchmarks/compare.py`` is made of: the ground all trainers stand on, one module for each trainer, and the figures."""
