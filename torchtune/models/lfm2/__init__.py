"""LFM2 and LFM2.5, the dense models."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(__name__)
