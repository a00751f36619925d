"""What a model is in numbers: architecture, parameter layout, FLOPs, activations, sizes of the
loss. Shared by plan and trainer.
"""
