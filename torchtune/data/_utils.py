"""Compatibility: names that recipes copied from earlier releases import from this path."""

import importlib
from collections.abc import Callable
from typing import Any

from torchtune.data._images import format_content_with_images, load_image
from torchtune.data._truncate import truncate

__all__ = ["chain", "format_content_with_images", "load_image", "truncate"]


def chain(*funcs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that applies ``funcs`` in order."""

    def chained(value: Any) -> Any:
        for function in funcs:
            value = function(value)
        return value

    return chained


def __getattr__(name: str) -> Any:
    if name in ("get_dataloader", "get_multi_dataset", "load_hf_dataset"):
        # A higher layer of the library defines the torchdata nodes of Hugging Face datasets.
        return getattr(importlib.import_module("torchtune.compat._torchdata"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
