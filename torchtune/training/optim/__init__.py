"""Optimizers: preparation for a model, low precision, the step in the backward pass, gradient norms."""
