"""Evaluation of models: scores of answers, perplexity, tasks of lm-eval, and comparisons of two models."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
