"""Compatibility: the name of models whose images stand among their tokens, which older recipes import."""

from typing import Any

from torch import nn

from torchtune.utils import UserError


class EarlyFusionModel(nn.Module):
    """A decoder that reads the embeddings of encoders among its tokens.

    Raises:
        UserError: always; these models are not in this release.

    Example:
        >>> isinstance(model, torchtune.modules.model_fusion.EarlyFusionModel)
        False
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UserError(
            "EarlyFusionModel: models with images among their tokens are not in this release: use a text model, or "
            "Llama 3.2 Vision (torchtune.models.llama3_2_vision)."
        )
