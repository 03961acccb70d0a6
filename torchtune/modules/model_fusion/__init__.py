"""Multimodal models that combine a text decoder with an encoder, and their fusion layers."""

from torchtune.modules.model_fusion._deep_fusion import DeepFusionModel
from torchtune.modules.model_fusion._early_fusion import EarlyFusionModel
from torchtune.modules.model_fusion._fusion_layers import FusionEmbedding, FusionLayer
from torchtune.modules.model_fusion._fusion_utils import get_fusion_params, register_fusion_module
from torchtune.modules.model_fusion._image_text import ImageTextModel

__all__ = [
    "DeepFusionModel",
    "EarlyFusionModel",
    "FusionEmbedding",
    "FusionLayer",
    "ImageTextModel",
    "get_fusion_params",
    "register_fusion_module",
]
