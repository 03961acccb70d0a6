"""Recipes and building blocks for fine-tuning large language models in native PyTorch."""

import sys

from torchtune._lazy import FormerModuleFinder, attach_stub

__version__ = "0.8.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

if FormerModuleFinder not in sys.meta_path:
    sys.meta_path.append(FormerModuleFinder)
