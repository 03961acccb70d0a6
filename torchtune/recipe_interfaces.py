"""Protocols of recipes, for type annotations; nothing needs to inherit from them."""

from typing import Any, Protocol


class FTRecipeInterface(Protocol):
    """A fine-tuning recipe."""

    def load_checkpoint(self, **kwargs: Any) -> None:
        """Load the checkpoint that training starts from."""

    def setup(self, **kwargs: Any) -> None:
        """Build all objects for training."""

    def train(self, **kwargs: Any) -> None:
        """Run the training loop."""

    def save_checkpoint(self, **kwargs: Any) -> None:
        """Save a checkpoint."""

    def cleanup(self, **kwargs: Any) -> None:
        """Release resources."""


class EvalRecipeInterface(Protocol):
    """An evaluation recipe."""

    def load_checkpoint(self, **kwargs: Any) -> None:
        """Load the checkpoint to evaluate."""

    def setup(self, **kwargs: Any) -> None:
        """Build all objects for evaluation."""

    def evaluate(self, **kwargs: Any) -> None:
        """Evaluate and report."""


class OrchestrationRecipeInterface(Protocol):
    """A recipe that runs several workers."""

    def setup(self, **kwargs: Any) -> None:
        """Start the workers."""

    def run(self, **kwargs: Any) -> None:
        """Wait until the workers have finished."""

    def cleanup(self, **kwargs: Any) -> None:
        """Stop the workers."""
