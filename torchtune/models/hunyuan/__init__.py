"""Hunyuan, the dense models: sizes from config.json."""

from torchtune.models.hunyuan._model_builders import SPEC

__all__ = ["SPEC"]
