"""Recipes and building blocks for fine-tuning large language models in native PyTorch."""

import sys

from torchtune._lazy import FormerModuleFinder, attach

__version__ = "0.8.0"

__getattr__, __dir__, __all__ = attach(
    __name__,
    dict.fromkeys(("generate", "load", "save"), "_facade"),
    (
        "checkpoints",
        "config",
        "data",
        "datasets",
        "estimate",
        "evaluation",
        "generation",
        "models",
        "modules",
        "rlhf",
        "supervision",
        "tokenizers",
        "training",
        "utils",
    ),
)

if FormerModuleFinder not in sys.meta_path:
    sys.meta_path.append(FormerModuleFinder)
