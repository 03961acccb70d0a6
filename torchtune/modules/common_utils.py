"""Context managers for key-value caches, and small helpers."""

import contextlib
from collections.abc import Generator
from functools import partial

import torch
from torch import nn

from torchtune._lazy import former_names
from torchtune.modules.low_precision import reparametrize_as_dtype_state_dict_post_hook

# Compatibility: LoRA recipes copied from earlier releases set it; it has no effect.
_use_low_cpu_ram = False
_low_ram_reparametrize_as_dtype_state_dict_post_hook = reparametrize_as_dtype_state_dict_post_hook


def _register_reparametrize_state_dict_hooks(
    module: nn.Module, dtype: torch.dtype = torch.bfloat16, offload_to_cpu: bool = True
) -> None:
    """Make ``module.state_dict()`` return dequantized weights."""
    hook = partial(reparametrize_as_dtype_state_dict_post_hook, dtype=dtype, offload_to_cpu=offload_to_cpu)
    module._register_state_dict_hook(hook)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that may have a key-value cache."""
    return [module for module in model.modules() if hasattr(module, "kv_cache") and hasattr(module, "cache_enabled")]


def _require_caches(model: nn.Module, action: str) -> list[nn.Module]:
    attentions = attention_modules(model)
    if not any(module.kv_cache is not None for module in attentions):
        raise ValueError(f"The model has no key-value caches to {action}: call setup_caches() first.")
    return attentions


@contextlib.contextmanager
def local_kv_cache(
    model: nn.Module,
    *,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    encoder_max_seq_len: int | None = None,
    decoder_max_seq_len: int | None = None,
) -> Generator[None, None, None]:
    """Set up the model's key-value caches inside the block and delete them after it.

    Args:
        model: model with ``setup_caches``.
        batch_size: size of the largest batch.
        device: device of the caches.
        dtype: dtype of the caches.
        encoder_max_seq_len: length of the encoder's cache.
        decoder_max_seq_len: length of the decoder's cache; by default the model's ``max_seq_len``.

    Raises:
        ValueError: the model has caches already.

    Example:
        >>> with torchtune.modules.local_kv_cache(model, batch_size=1, device=torch.device("cpu"), dtype=torch.float32):
        ...     model.caches_are_enabled()
        True
        >>> model.caches_are_enabled()
        False
    """
    if model.caches_are_setup():
        raise ValueError("The model has key-value caches already: call delete_kv_caches() before making local ones.")
    with torch.device(device):
        model.setup_caches(
            batch_size, dtype, encoder_max_seq_len=encoder_max_seq_len, decoder_max_seq_len=decoder_max_seq_len
        )
    try:
        yield
    finally:
        delete_kv_caches(model)


@contextlib.contextmanager
def disable_kv_cache(model: nn.Module) -> Generator[None, None, None]:
    """Disable the model's key-value caches inside the block, without changing their contents.

    Raises:
        ValueError: the model has no caches, or they are disabled already.

    Example:
        >>> model.setup_caches(1, torch.float32, decoder_max_seq_len=8)
        >>> with torchtune.modules.disable_kv_cache(model):
        ...     model.caches_are_enabled()
        False
    """
    attentions = _require_caches(model, "disable")
    if not any(module.cache_enabled for module in attentions):
        raise ValueError("The model's key-value caches are disabled already.")
    enabled = [module.cache_enabled for module in attentions]
    for module in attentions:
        module.cache_enabled = False
    try:
        yield
    finally:
        for module, state in zip(attentions, enabled, strict=True):
            module.cache_enabled = state


def delete_kv_caches(model: nn.Module) -> None:
    """Remove the model's key-value caches. Raises ``ValueError`` if it has none.

    Example:
        >>> model.setup_caches(1, torch.float32, decoder_max_seq_len=8)
        >>> torchtune.modules.delete_kv_caches(model)
        >>> model.caches_are_setup()
        False
    """
    for module in _require_caches(model, "delete"):
        module.kv_cache = None
        module.cache_enabled = False


def slice_str_to_array(slice_str: str, length: int) -> list[bool]:
    """Parse indices and slices, such as ``"0,2"``, ``"1:3"``, ``":-1"`` or ``"0,::2"``, to a mask of ``length`` items.

    Raises:
        ValueError: a part is neither an index nor a slice, or an index is out of range.
    """
    mask = [False] * length
    for part in slice_str.split(","):
        numbers: list[int | None] = []  # an index, or start, stop and step of a slice; None: left out
        for number in part.split(":"):
            if not number.strip():
                numbers.append(None)
                continue
            try:
                numbers.append(int(number))
            except ValueError as error:
                raise ValueError(f"'{part}' in '{slice_str}' is neither an index nor a slice.") from error
        if len(numbers) > 3 or numbers == [None]:
            raise ValueError(f"'{part}' in '{slice_str}' is neither an index nor a slice.")
        if len(numbers) > 1:
            for index in range(length)[slice(*numbers)]:
                mask[index] = True
            continue
        index = numbers[0]
        if not -length <= index < length:
            raise ValueError(f"Index {index} in '{slice_str}' is outside a list of {length}.")
        mask[index] = True
    return mask


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is sharded, so that its forward pass has all-gathers."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # slow to import

    return any(isinstance(part, FSDPModule) for part in module.modules())


__getattr__ = former_names(__name__)
