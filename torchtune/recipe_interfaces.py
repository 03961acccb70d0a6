"""What recipes look like from outside; nothing inherits from these but for its type."""

from typing import Any, Protocol


class FTRecipeInterface(Protocol):
    """A fine-tuning recipe."""

    def load_checkpoint(self, **kwargs: Any) -> None:
        """Read the checkpoint that training starts from."""

    def setup(self, **kwargs: Any) -> None:
        """Build everything that training needs."""

    def train(self, **kwargs: Any) -> None:
        """Run the training loop."""

    def save_checkpoint(self, **kwargs: Any) -> None:
        """Write a checkpoint."""

    def cleanup(self, **kwargs: Any) -> None:
        """Close what was opened."""


class EvalRecipeInterface(Protocol):
    """An evaluation recipe."""

    def load_checkpoint(self, **kwargs: Any) -> None:
        """Read the checkpoint that is evaluated."""

    def setup(self, **kwargs: Any) -> None:
        """Build everything that evaluation needs."""

    def evaluate(self, **kwargs: Any) -> None:
        """Evaluate and report."""


class OrchestrationRecipeInterface(Protocol):
    """A recipe that runs several workers."""

    def setup(self, **kwargs: Any) -> None:
        """Start the workers."""

    def run(self, **kwargs: Any) -> None:
        """Let them work to the end."""

    def cleanup(self, **kwargs: Any) -> None:
        """Stop them."""
