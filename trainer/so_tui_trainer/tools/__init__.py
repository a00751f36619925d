"""Helper processes for work that needs torch, transformers or datasets: JSON on stdin, JSON on
stdout. so-tui itself stays light.
"""
