"""Qwen3-Next, mixtures of experts with linear attention."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(__name__)
