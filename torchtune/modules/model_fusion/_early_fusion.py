"""Compatibility: name of early-fusion models, which older recipes import."""

from typing import Any

from torch import nn

from torchtune.utils import UserError


class EarlyFusionModel(nn.Module):
    """Placeholder of a decoder with encoder embeddings among its tokens.

    Raises:
        UserError: always, because this release has no early-fusion models.

    Example:
        >>> isinstance(model, torchtune.modules.model_fusion.EarlyFusionModel)
        False
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UserError(
            "EarlyFusionModel: models with images among their tokens are not in this release: use a text model, or "
            "Llama 3.2 Vision (torchtune.models.llama3_2_vision)."
        )
