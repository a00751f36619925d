"""From a model's name to a model that trains: weights, attention, kernels, activation checkpointing and the loss."""
