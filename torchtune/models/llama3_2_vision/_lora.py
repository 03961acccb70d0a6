"""LoRA on parts of a vision model."""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from torch import nn

from torchtune.models._builders import LoraAttnModules
from torchtune.models._description import ModelError

Model = TypeVar("Model", bound=nn.Module)


def part_of(path: str) -> str:
    """The part of a model that a module belongs to: decoder, encoder or fusion."""
    names = path.split(".")
    if "fusion_layer" in names or "projection" in names:
        return "fusion"
    return "encoder" if "clip" in names else "decoder"


def adapt(
    model: Model,
    parts: Mapping[str, bool],
    attn_modules: LoraAttnModules,
    apply_to_mlp: bool,
    apply_to_output: bool,
    *,
    quantize_base: bool = False,
    **lora: Any,
) -> Model:
    """Add LoRA adapters to the chosen parts of a model, freeze everything else, and return it.

    Args:
        model: of Llama 3.2 Vision, or its decoder or encoder.
        parts: whether each part has adapters.
        attn_modules: projections of attention with an adapter.
        apply_to_mlp: whether the feed-forward projections have one.
        apply_to_output: whether the output projections of the decoder and of the projection head have one.
        quantize_base: quantize the frozen base weights to NF4.
        lora: further arguments of :class:`torchtune.modules.peft.LoRA`.

    Raises:
        ModelError: no part has adapters.
    """
    from torchtune.modules.conversion import apply_conversions
    from torchtune.modules.low_precision import QuantizeBase
    from torchtune.modules.peft import LORA_ATTN_MODULES, LoRA

    if not any(parts.values()):
        raise ModelError(f"No part has adapters ({', '.join(parts)}): nothing would be trained, choose one at least.")
    known = get_args(LORA_ATTN_MODULES)
    if wrong := [name for name in attn_modules if name not in known]:
        raise ModelError(f"lora_attn_modules has '{wrong[0]}': choose out of {', '.join(known)}.")
    leaves = [f"attn.{name}" for name in attn_modules]
    leaves += ["mlp.w1", "mlp.w2", "mlp.w3"] if apply_to_mlp else []
    targets = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and parts.get(part_of(path))
        and (path.endswith(tuple(leaves)) or (apply_to_output and path.rpartition(".")[2] == "output"))
    ]
    if not targets:
        raise ModelError("lora_attn_modules is empty: name projections of attention, or set apply_lora_to_mlp.")
    conversions = [LoRA(target_modules=targets, **lora)]
    apply_conversions(model, [QuantizeBase(), *conversions] if quantize_base else conversions)
    return model
