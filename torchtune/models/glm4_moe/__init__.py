"""GLM-4.5, 4.6 and 4.7, mixtures of experts."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(__name__)
