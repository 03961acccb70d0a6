"""Compatibility: names of vision models that generation and evaluation recipes copied from earlier releases import.

The recipes ask whether a model is one of them; text models are not. Building one raises: vision models are not in this
release.
"""

from typing import Any

from torch import nn

from torchtune.utils import UserError

__all__ = ["DeepFusionModel", "EarlyFusionModel"]


class DeepFusionModel(nn.Module):
    """A decoder with cross-attention to an encoder.

    Raises:
        UserError: always; vision models are not in this release.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UserError(f"{type(self).__name__}: vision models are not in this release: use a text model.")


class EarlyFusionModel(DeepFusionModel):
    """A decoder that reads the embeddings of encoders among its tokens.

    Raises:
        UserError: always; vision models are not in this release.
    """
