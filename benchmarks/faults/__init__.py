"""The fault campaign: real runs of ``tiny`` that meet a fault, and what must hold afterwards
(docs/faults.md).
"""
