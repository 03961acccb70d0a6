"""GLM-4.7-Flash, a mixture of experts with latent attention."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(__name__)
