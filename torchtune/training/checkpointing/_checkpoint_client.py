"""Compatibility: recipes copied from earlier releases import the client from this path."""

from torchtune.training.compat import CheckpointClient, TrainingProgress

__all__ = ["CheckpointClient", "TrainingProgress"]
