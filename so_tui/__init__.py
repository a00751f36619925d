"""so-tui: plan, launch and watch full-parameter fine-tuning on Grace Hopper machines.

The packages below this one never import textual (but for ``so_tui.ui``), torch, deepspeed or
transformers.
"""

__version__ = "0.1.0"
