"""Qwen 3.5 and 3.6, the mixtures of experts."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(__name__)
