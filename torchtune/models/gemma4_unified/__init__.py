"""Gemma 4 without encoders (12B), its text."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(__name__)
