"""Helper processes for what needs torch, transformers or datasets: JSON on stdin, JSON on stdout, so that so-tui itself stays light."""
