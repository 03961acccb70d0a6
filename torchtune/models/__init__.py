"""Model families: sizes, weight names, Hugging Face configs, and the builder of all models."""

from torchtune._lazy import attach_stub, modules_in

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, modules_in(__path__))
