"""From a name to a model that trains: weights, attention, kernels, what is computed again, and the loss."""
