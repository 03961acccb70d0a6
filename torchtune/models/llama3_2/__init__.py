"""Llama 3.2, the text models."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(__name__)
