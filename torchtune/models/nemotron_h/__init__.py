"""Nemotron-H and Nemotron 3."""

from torchtune._lazy import attach
from torchtune.models.nemotron_h._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
