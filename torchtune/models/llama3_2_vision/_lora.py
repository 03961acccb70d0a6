"""LoRA adapters on parts of a vision model."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torchtune.models._build_vision import adapt_parts, check_parts
from torchtune.models._builders import LoraAttnModules, Model, named_function


def part_of(path: str) -> str:
    """Return the part of a model that a module belongs to: decoder, encoder or fusion."""
    names = path.split(".")
    if "fusion_layer" in names or "projection" in names:
        return "fusion"
    return "encoder" if "clip" in names else "decoder"


def adapt(
    model: Model,
    parts: Mapping[str, bool],
    lora_attn_modules: LoraAttnModules,
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    *,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> Model:
    """Add LoRA adapters to parts of a model, freeze all other parameters, and return the model.

    Args:
        model: Llama 3.2 Vision, or its decoder or encoder.
        parts: whether each part has adapters.
        lora_attn_modules: projections of attention with an adapter.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projections of decoder and projection head have an adapter.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.

    Raises:
        ModelError: no part or module is chosen, or ``lora_attn_modules`` has an unknown name.
    """
    ways = {part: "lora" if has_adapters else "frozen" for part, has_adapters in parts.items()}
    check_parts(ways, "lora", "")
    return adapt_parts(
        model,
        ways,
        lora_attn_modules,
        apply_lora_to_mlp,
        apply_lora_to_output,
        quantize_base,
        part_of,
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        use_dora=use_dora,
    )


def lora_part_builder(base: Callable[..., Model], part: str, name: str, noun: str) -> Callable[..., Model]:
    """Make the LoRA variant of the builder of a part; its arguments are keyword-only.

    Args:
        base: builder of the part without adapters.
        part: name of the part with adapters, in addition to the fusion layers.
        name: name of the new function.
        noun: name of the built model, for the docstring.
    """
    keyword_only, own = inspect.Parameter.KEYWORD_ONLY, inspect.signature(base).parameters
    flags = {
        chosen: inspect.Parameter(f"{chosen}_lora", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=bool)
        for chosen in (part, "fusion")
    }
    _, _, *adapter = inspect.signature(adapt).parameters.values()
    first = [parameter for parameter in adapter if parameter.kind is not keyword_only]
    rest = [parameter for parameter in adapter if parameter.kind is keyword_only]
    signature = inspect.signature(base).replace(parameters=[*flags.values(), *first, *own.values(), *rest])

    def builder(*args: Any, **kwargs: Any) -> Model:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        parts = {chosen: values[flag.name] for chosen, flag in flags.items()}
        return adapt(
            base(**{key: values[key] for key in own}), parts, **{one.name: values[one.name] for one in adapter}
        )

    builder.__signature__ = signature
    doc = f"The other arguments are those of :func:`{base.__name__}` and of the ``lora_*`` builders."
    return named_function(builder, name, base.__module__, f"Build {noun}.\n\n    {doc}\n    ")
