"""Multimodal models that combine a text decoder with an encoder, and their fusion layers."""

from torchtune.modules.model_fusion._fusion_layers import (
    FusionEmbedding,
    FusionLayer,
    get_fusion_params,
    register_fusion_module,
)
from torchtune.modules.model_fusion._fusion_models import DeepFusionModel, EarlyFusionModel, ImageTextModel

__all__ = [
    "DeepFusionModel",
    "EarlyFusionModel",
    "FusionEmbedding",
    "FusionLayer",
    "ImageTextModel",
    "get_fusion_params",
    "register_fusion_module",
]
