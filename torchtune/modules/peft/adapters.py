"""Utilities that find, freeze, save and merge adapter parameters."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from torchtune.modules.conversion import ConversionError, get_conversions
from torchtune.modules.peft.lora import merged_weight
from torchtune.utils import deprecate_parameter

LORA_ATTN_MODULES = Literal["q_proj", "k_proj", "v_proj", "output_proj"]
MLP_MODULES = ("w1", "w2", "w3")
# Input projections of mixers, which q_proj, k_proj and v_proj select.
MIXER_INPUTS = ("qkv_proj", "qkvz_proj", "in_proj")
# Projections that these names select in attention and latent attention.
ATTENTION_TARGETS = {
    "q_proj": ("q_proj", "q_down_proj"),
    "k_proj": ("k_proj", "kv_down_proj", "kv_proj"),
    "v_proj": ("v_proj", "kv_down_proj", "kv_proj"),
}


@runtime_checkable
class AdapterModule(Protocol):
    """Interface of modules with adapter parameters."""

    def adapter_params(self) -> list[str]:
        """Return the names of the adapter's parameters, relative to the module."""
        ...


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over path and module of every :class:`AdapterModule` in ``model``."""
    for path, module in model.named_modules():
        # issubclass is cached by Python; isinstance with a protocol takes about 20 µs per module.
        if issubclass(type(module), AdapterModule):
            yield path, module


def get_adapter_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter parameters of ``model`` by full name.

    Raises:
        ConversionError: ``adapter_params()`` of a module lists an unknown parameter.

    Example:
        >>> from torchtune.modules.peft import LoRA, get_adapter_params
        >>> model, _ = torchtune.load(checkpoint, adapter=LoRA(rank=2, target_modules=["layers.0.*.q_proj"]))
        >>> list(get_adapter_params(model))
        ['layers.0.attn.q_proj.lora_a.weight', 'layers.0.attn.q_proj.lora_b.weight']
    """
    params: dict[str, nn.Parameter] = {}
    for path, module in adapter_modules(model):
        module_params = dict(module.named_parameters())
        for name in module.adapter_params():
            if name not in module_params:
                raise ConversionError(
                    f"{path or type(module).__name__}: adapter_params() names '{name}', which is not one of its "
                    "parameters."
                )
            prefix = f"{path}." if path else ""
            params[f"{prefix}{name}"] = module_params[name]
    return params


def owned_parameters(model: nn.Module) -> set[str]:
    """Return the names of parameters that conversions save separately from the base weights, such as adapters'.

    Example:
        >>> from torchtune.modules.peft import owned_parameters
        >>> owned_parameters(model)
        set()
    """
    names: set[str] = set()
    for conversion in get_conversions(model):
        names |= conversion.owned_parameters(model)
    return names


def has_adapters(model: nn.Module) -> bool:
    """Return whether the model has adapters, or other parameters that a conversion owns.

    Example:
        >>> torchtune.modules.peft.has_adapters(model)
        False
    """
    has_adapter_module = next(adapter_modules(model), None) is not None
    return has_adapter_module or bool(owned_parameters(model))


def require_adapters(model: nn.Module) -> None:
    """Check that the model has adapters, or other parameters that a conversion owns.

    Raises:
        ConversionError: ``model`` has no such parameters.

    Example:
        >>> from torchtune.modules.peft import require_adapters
        >>> require_adapters(model)
        Traceback (most recent call last):
            ...
        torchtune...
    """
    if not has_adapters(model):
        raise ConversionError(
            "model: it has no adapters to train: use a lora_* builder or add torchtune.modules.peft.LoRA to "
            "model_converters; a conversion of your own names its parameters in owned_parameters(model)."
        )


def set_trainable_params(model: nn.Module, adapter_params: dict[str, Any] | set[str]) -> None:
    """Set ``requires_grad`` for the parameters named in ``adapter_params`` and clear it for all others.

    Example:
        >>> from torchtune.modules.peft import set_trainable_params
        >>> set_trainable_params(model, {"norm.scale"})
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['norm.scale']
    """
    for name, param in model.named_parameters():
        param.requires_grad_(name in adapter_params)


def is_adapter_key(key: str) -> bool:
    """Return whether a state-dict key has the name of an adapter parameter: ``….lora_….…`` or ``….magnitude``.

    For code without a model; otherwise use :func:`get_adapter_params`.
    """
    return any(part.startswith("lora_") or part == "magnitude" for part in key.split("."))


def get_adapter_state_dict(state_dict: dict[str, Any], device: str | None = "cpu") -> dict[str, Any]:
    """Return the adapter's entries of ``state_dict``, moved to ``device`` (``None``: not moved).

    Example:
        >>> from torchtune.modules.peft import get_adapter_state_dict
        >>> state_dict = {"q_proj.weight": torch.ones(2, 2), "q_proj.lora_a.weight": torch.ones(1, 2)}
        >>> list(get_adapter_state_dict(state_dict))
        ['q_proj.lora_a.weight']
    """
    adapter = {key: value for key, value in state_dict.items() if is_adapter_key(key)}
    if device is None:
        return adapter
    return {key: value.to(device) for key, value in adapter.items()}


def get_lora_module_names(
    lora_attn_modules: Sequence[LORA_ATTN_MODULES], apply_lora_to_mlp: bool, apply_lora_to_output: bool
) -> list[str]:
    """Return the names of adapted modules: ``lora_attn_modules``, then ``w1 w2 w3``, then ``output``.

    Example:
        >>> from torchtune.modules.peft import get_lora_module_names
        >>> get_lora_module_names(["q_proj"], apply_lora_to_mlp=True, apply_lora_to_output=False)
        ['q_proj', 'w1', 'w2', 'w3']
    """
    names: list[str] = list(lora_attn_modules)
    if apply_lora_to_mlp:
        names += MLP_MODULES
    if apply_lora_to_output:
        names.append("output")
    return names


@contextmanager
def disable_adapter(model: nn.Module) -> Generator[None, None, None]:
    """Disable the adapters inside the block, so that the model computes with its base weights.

    An adapter is a module with ``adapter_params()`` and an attribute ``disabled``.

    Raises:
        ConversionError: a conversion owns parameters of a module that is no such adapter, or trains base weights.

    Example:
        >>> from torchtune.modules.peft import LoRA, disable_adapter
        >>> model, _ = torchtune.load(checkpoint, adapter=LoRA(rank=2), device="cpu")
        >>> with disable_adapter(model):
        ...     reference = model(torch.tensor([[5, 40, 7]]))  # logits of the base model
    """
    for conversion in get_conversions(model):
        for name in sorted(conversion.trained_weights(model)):  # the first name stands for all
            raise ConversionError(
                f"'{name}' is trained beside the adapter, so the base model's answers are lost with its first update: "
                "give the reference a checkpoint of its own, or leave the module out of train_modules."
            )
    # Trained parameters that no switch turns off, such as rows of new tokens: the base model cannot be computed.
    still_enabled = owned_parameters(model)
    for path, module in adapter_modules(model):
        if hasattr(module, "disabled"):
            prefix = f"{path}." if path else ""
            still_enabled -= {f"{prefix}{name}" for name in module.adapter_params()}
    if still_enabled:
        raise ConversionError(
            f"'{min(still_enabled)}' cannot be switched off for the base model's answers: give its module "
            "adapter_params() and an attribute `disabled`, or give the reference a checkpoint of its own."
        )
    disabled_here = []  # adapters that are disabled already stay so after the block
    try:
        for _, module in adapter_modules(model):
            if getattr(module, "disabled", None) is False:
                module.disabled = True
                disabled_here.append(module)
        yield
    finally:
        for module in disabled_here:
            module.disabled = False


@torch.no_grad()
def get_merged_lora_ckpt(
    state_dict: dict[str, Any], rank: int, alpha: float, use_distributed_barriers: bool = False
) -> dict[str, Any]:
    """Merge adapters into the weights of ``state_dict`` in place, and remove the adapters' entries.

    Args:
        state_dict: weights of base and adapter, on one device.
        rank: rank of the adapters.
        alpha: the update is scaled by alpha / rank.
        use_distributed_barriers: synchronize all ranks after every weight.

    Returns:
        ``state_dict`` itself.

    Raises:
        ConversionError: an adapter is incomplete or has no base weight.

    Example:
        >>> from torchtune.modules.peft import get_merged_lora_ckpt
        >>> names = ("q_proj.weight", "q_proj.lora_a.weight", "q_proj.lora_b.weight")
        >>> state_dict = dict(zip(names, (torch.zeros(2, 2), torch.ones(1, 2), torch.ones(2, 1))))
        >>> get_merged_lora_ckpt(state_dict, rank=1, alpha=2)
        {'q_proj.weight': tensor([[2., 2.],
                [2., 2.]])}
    """
    for key in list(state_dict):  # a copy: entries are removed
        if not key.endswith(".lora_a.weight"):
            continue
        path = key.removesuffix(".lora_a.weight")
        needed = (f"{path}.weight", f"{path}.lora_b.weight")
        missing = [name for name in needed if name not in state_dict]
        if missing:
            raise ConversionError(f"{path}: the adapter cannot be merged, the state dict lacks {', '.join(missing)}.")
        weight = state_dict[f"{path}.weight"]
        a = state_dict.pop(key)
        b = state_dict.pop(f"{path}.lora_b.weight")
        magnitude = state_dict.pop(f"{path}.magnitude", None)  # of DoRA
        state_dict[f"{path}.weight"] = merged_weight(weight, a, b, alpha / rank, magnitude)
        if use_distributed_barriers:
            torch.distributed.barrier()
    return state_dict


_BY_KEYS = "Pass state_dict_keys, the keys of the model's state dict, instead."


@deprecate_parameter("lora_attn_modules", _BY_KEYS)
@deprecate_parameter("apply_lora_to_mlp", _BY_KEYS)
@deprecate_parameter("apply_lora_to_output", _BY_KEYS)
def validate_missing_and_unexpected_for_lora(
    lora_attn_modules: Sequence[LORA_ATTN_MODULES] | None = None,
    apply_lora_to_mlp: bool | None = None,
    apply_lora_to_output: bool | None = None,
    state_dict_keys: Sequence[str] | None = None,
    base_missing: Sequence[str] | None = None,
    base_unexpected: Sequence[str] | None = None,
    lora_missing: Sequence[str] | None = None,
    lora_unexpected: Sequence[str] | None = None,
) -> None:
    """Check the missing and unexpected keys of two calls of ``load_state_dict(strict=False)``: base, then adapter.

    Args:
        lora_attn_modules: adapted attention modules; deprecated way to select the adapter's keys.
        apply_lora_to_mlp: see ``lora_attn_modules``.
        apply_lora_to_output: see ``lora_attn_modules``.
        state_dict_keys: all keys of the model; takes precedence over the three arguments above.
        base_missing: missing keys of the base.
        base_unexpected: unexpected keys of the base.
        lora_missing: missing keys of the adapter (``None``: no adapter was loaded).
        lora_unexpected: unexpected keys of the adapter.

    Raises:
        ConversionError: a key of base or adapter is missing, or there are unexpected keys.
    """
    names = get_lora_module_names(lora_attn_modules or [], bool(apply_lora_to_mlp), bool(apply_lora_to_output))

    def is_of_adapter(key: str) -> bool:
        if not is_adapter_key(key):
            return False
        if state_dict_keys is not None or not names:  # no module is named: every adapter key counts
            return True
        module_path = key.rpartition(".lora_")[0] or key.removesuffix(".magnitude")
        module_name = module_path.rpartition(".")[2]
        return module_name in names

    def refuse(problem: str, keys: Iterable[str] | None) -> None:
        keys = sorted(keys or ())
        if not keys:
            return
        examples = ", ".join(keys[:3])
        if len(keys) > 3:
            examples += f" and {len(keys) - 3} more"
        raise ConversionError(f"{problem}: {examples}; check that model and checkpoint belong together.")

    # The base is loaded without the adapter's keys, and the adapter without the base's: each misses those of the other.
    missing_base_keys = [key for key in base_missing or () if not is_of_adapter(key)]
    missing_adapter_keys = [key for key in lora_missing or () if is_of_adapter(key)]
    refuse("Keys of the base are missing from the checkpoint", missing_base_keys)
    refuse("The base checkpoint holds keys that the model does not have", base_unexpected)
    refuse("Keys of the adapter are missing from its checkpoint", missing_adapter_keys)
    refuse("The adapter's checkpoint holds keys that the model does not have", lora_unexpected)
