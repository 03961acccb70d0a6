"""DeepSeek V3 and models of its architecture, mixtures of experts with latent attention."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(__name__)
