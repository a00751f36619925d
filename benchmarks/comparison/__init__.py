"""Parts of ``benchmarks/compare.py``: the common inputs of all trainers, one module for each
trainer, and the figures.
"""
