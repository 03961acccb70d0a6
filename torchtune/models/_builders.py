"""Public builders ``x()``, ``lora_x(...)`` and ``qlora_x(...)``, made from a family's table of sizes."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_type_hints

from torch import nn

from torchtune.models._build import build
from torchtune.models._description import Description
from torchtune.models._rope_scaling import Llama3RopeScaling
from torchtune.models._spec import ModelSpec
from torchtune.modules.classifier import classifier_model
from torchtune.modules.transformer import TransformerDecoder

LoraAttnModules = list[Literal["q_proj", "k_proj", "v_proj", "output_proj"]]
Builder = Callable[..., TransformerDecoder]
Model = TypeVar("Model", bound=nn.Module)

_LORA_DOC = """
    Args:
        lora_attn_modules: attention projections with an adapter; in mixers, ``q_proj``, ``k_proj`` and ``v_proj``
            mean the projection of the input, in latent attention those to and from latents.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projection has one; it must not be tied to the embeddings.{numbers}
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.{tie}
    """
_NUMBERS_DOC = "\n        (sizes of the model): as in :func:`{base}`."
_TIE_DOC = "\n        tie_word_embeddings: whether the output projection shares its weight with the embeddings."

# Argument -> its description in docstrings.
_NUMBERS = {
    "vocab_size": "number of tokens.",
    "num_layers": "number of layers.",
    "num_heads": "query heads per layer.",
    "head_dim": "head dimension; by default ``embed_dim // num_heads``.",
    "num_kv_heads": "key and value heads per layer.",
    "embed_dim": "width of the residual stream.",
    "intermediate_dim": "width of the feed-forward layers; by default computed from ``embed_dim``.",
    "max_seq_len": "longest sequence.",
    "attn_dropout": "dropout probability of attention weights; must be 0 with a soft cap.",
    "norm_eps": "eps of the norms.",
    "rope_base": "base (theta) of the rotary embeddings.",
    "hidden_capping_value": "bound of attention's scores.",
    "final_capping_value": "bound of the logits.",
    "sliding_window_size": "sliding window of layers 0, 2, 4 …, in positions.",
    "query_pre_attn_scalar": "attention scores are scaled by its inverse square root; by default ``head_dim``.",
    "scale_factor": "factor of Llama 3.1's RoPE scaling; ``None``, as in SmolLM 2, for no scaling.",
    "tie_word_embeddings": "whether the output projection shares its weight with the embeddings.",
    "q_proj_bias": "whether the query projection has a bias; likewise for the next two.",
    "k_proj_bias": "see ``q_proj_bias``.",
    "v_proj_bias": "see ``q_proj_bias``.",
    "q_norm": "whether queries are normalized per head (before RoPE in Qwen 3, else after it).",
    "k_norm": "whether keys are normalized per head; must equal ``q_norm``.",
}
_FLOATS = frozenset("attn_dropout norm_eps rope_base hidden_capping_value final_capping_value scale_factor".split())


def component_builders(
    module: str,
    name: str,
    title: str,
    spec: ModelSpec,
    describe: Callable[..., Description],
    required: str,
    **defaults: Any,
) -> dict[str, Builder]:
    """Make the builders of a family from the sizes of a model.

    Args:
        module: ``__name__`` of the module that exports the builders; they become its attributes.
        name: name of the first function.
        title: name of the family in docstrings.
        spec: the model family.
        describe: makes the description from the arguments of the builder.
        required: names of the arguments without a default; they come first in the signature.
        **defaults: names and defaults of the other arguments.

    Returns:
        The builders ``name`` and ``lora_name``.
    """
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=_type(key, default))
        for key, default in (dict.fromkeys(required.split(), empty) | defaults).items()
    ]
    signature = inspect.Signature(parameters, return_annotation=TransformerDecoder)

    def builder(*args: Any, **kwargs: Any) -> TransformerDecoder:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        sizes = dict(bound.arguments)
        sizes["intermediate_dim"] = sizes["intermediate_dim"] or scale_hidden_dim_for_mlp(sizes["embed_dim"])
        return build(describe(**sizes), spec)

    _set_signature(builder, signature)
    arguments = "".join(f"\n        {key}: {_NUMBERS[key]}" for key in signature.parameters)
    dress(builder, name, module, f"Build a decoder of the {title} family from its sizes.\n\n    Args:{arguments}\n    ")
    what = f"a {title} decoder with LoRA adapters from its sizes"
    return exported(module, {name: builder, f"lora_{name}": lora_builder(builder, f"lora_{name}", module, what)})


def exported(module: str, builders: dict[str, Builder]) -> dict[str, Builder]:
    """Make builders attributes of a module, as if the module had defined them, and return the builders."""
    vars(sys.modules[module]).update(builders)
    return builders


def llama3_scaled(scale_factor: float | None, **sizes: Any) -> Description:
    """Make a description with Llama 3.1's RoPE scaling; a ``scale_factor`` of None disables scaling."""
    scaling = None if scale_factor is None else Llama3RopeScaling(factor=scale_factor)
    return Description(rope_scaling=scaling, **sizes)


def _type(argument: str, default: Any) -> Any:
    found = bool if isinstance(default, bool) else float if argument in _FLOATS else int
    return found | None if default is None else found


def _set_signature(function: Builder, signature: inspect.Signature) -> None:
    function.__signature__ = signature
    function.__annotations__ = {key: parameter.annotation for key, parameter in signature.parameters.items()}
    function.__annotations__["return"] = signature.return_annotation


def model_builders(
    module: str,
    title: str,
    spec: ModelSpec,
    sizes: Mapping[str, Description],
    *,
    lora: bool = True,
    qlora: bool = True,
    tie_option: bool = False,
) -> dict[str, Builder]:
    """Make a builder for every row of a family's table.

    Args:
        module: ``__name__`` of the module that exports the builders; they become its attributes.
        title: name of the family in docstrings, for example ``"Llama 3"``.
        spec: the model family.
        sizes: builder name -> description.
        lora: also make ``lora_*``.
        qlora: also make ``qlora_*``.
        tie_option: whether the builders have the argument ``tie_word_embeddings``.

    Returns:
        Name -> builder, with signature, annotations and docstring.
    """
    builders: dict[str, Builder] = {}
    for name, description in sizes.items():
        sentence = f"{title} {_size_of(name)}"
        numbers = (
            f"{description.num_layers} layers, {description.embed_dim:,} wide, vocabulary "
            f"{description.vocab_size:,}, up to {description.max_seq_len:,} tokens."
        )
        base = _base_builder(spec, description, tie_option)
        builders[name] = dress(base, name, module, f"Build {sentence}: {numbers}" + _tie_args(tie_option))
        if lora:
            builders[f"lora_{name}"] = lora_builder(base, f"lora_{name}", module, f"{sentence} with LoRA adapters")
        if lora and qlora:
            builders[f"qlora_{name}"] = lora_builder(
                base, f"qlora_{name}", module, f"{sentence} with LoRA adapters over a 4-bit base", quantize_base=True
            )
    return exported(module, builders)


def lora_builder(base: Builder, name: str, module: str, noun: str, *, quantize_base: bool = False) -> Builder:
    """Make the LoRA variant of a builder. The base builder's arguments become keyword-only.

    Args:
        base: builder without an adapter.
        name: name of the new function.
        module: ``__name__`` of the module that exports it.
        noun: name of the built model, for the docstring.
        quantize_base: default of the argument ``quantize_base``.
    """
    own = inspect.signature(base).parameters
    required = any(parameter.default is inspect.Parameter.empty for parameter in own.values())
    signature = _lora_signature(base, required, quantize_base)
    adapter = tuple(key for key in signature.parameters if key not in own)

    def builder(*args: Any, **kwargs: Any) -> TransformerDecoder:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        model = base(**{key: values[key] for key in own})
        return add_lora(model, **{key: values[key] for key in adapter})

    _set_signature(builder, signature)
    numbers = _NUMBERS_DOC.format(base=base.__name__) if required else ""
    tie = _TIE_DOC if "tie_word_embeddings" in own and not required else ""
    return dress(builder, name, module, f"Build {noun}.\n{_LORA_DOC.format(numbers=numbers, tie=tie)}")


def add_lora(
    model: TransformerDecoder,
    lora_attn_modules: LoraAttnModules,
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Add LoRA adapters to a model, with the arguments of the ``lora_*`` builders, and return it."""
    from torchtune.modules.peft import LoRA

    lora = LoRA(
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        attn_modules=lora_attn_modules,
        apply_to_mlp=apply_lora_to_mlp,
        apply_to_output=apply_lora_to_output,
        use_dora=use_dora,
    )
    return convert_to_lora(model, lora, quantize_base)


def convert_to_lora(model: Model, lora: Any, quantize_base: bool) -> Model:
    from torchtune.modules.conversion import apply_conversions
    from torchtune.modules.low_precision import QuantizeBase

    apply_conversions(model, [QuantizeBase(), lora] if quantize_base else [lora])
    return model


def scale_hidden_dim_for_mlp(dim: int, multiple_of: int = 256) -> int:
    """Return the width of Llama's feed-forward layers: two thirds of ``4 * dim``, rounded up to a multiple."""
    hidden = int(2 * (4 * dim) / 3)
    return -(-hidden // multiple_of) * multiple_of


def _base_builder(spec: ModelSpec, description: Description, tie_option: bool) -> Builder:
    if not tie_option:

        def builder() -> TransformerDecoder:
            return build(description, spec)

        return builder

    def tying_builder(tie_word_embeddings: bool = True) -> TransformerDecoder:
        return build(replace(description, tie_word_embeddings=tie_word_embeddings), spec)

    return tying_builder


def _lora_signature(base: Builder, required: bool, quantize_base: bool) -> inspect.Signature:
    def parameters(function: Builder) -> dict[str, inspect.Parameter]:
        hints = get_type_hints(function)
        found = inspect.signature(function).parameters
        return {key: value.replace(annotation=hints[key]) for key, value in found.items()}

    own, adapter = parameters(base), parameters(add_lora)
    del adapter["model"]
    adapter["quantize_base"] = adapter["quantize_base"].replace(default=quantize_base)
    if not required:
        return inspect.Signature([*adapter.values(), *own.values()], return_annotation=TransformerDecoder)
    first = ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output")
    keywords = {key: value for key, value in adapter.items() if key not in first}
    for key in ("lora_rank", "lora_alpha"):
        keywords[key] = keywords[key].replace(default=inspect.Parameter.empty)
    rest = [value.replace(kind=inspect.Parameter.KEYWORD_ONLY) for value in {**own, **keywords}.values()]
    return inspect.Signature([*(adapter[key] for key in first), *rest], return_annotation=TransformerDecoder)


def dress(function: Builder, name: str, module: str, doc: str) -> Builder:
    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    function.__doc__ = doc
    return function


def _tie_args(tie_option: bool) -> str:
    return f"\n\n    Args:{_TIE_DOC}\n    " if tie_option else ""


def _size_of(name: str) -> str:
    """Return the size in a builder's name: ``"1.5B instruct"`` for ``"qwen2_5_1_5b_instruct"``."""
    found = re.search(r"(?:^|_)(\d+x\d+|\d(?:_\d+)?|\d+)([bm])(?:_(\w+))?$", name.replace("_3_1_", "_3.1_"))
    if found is None:  # "phi3_mini" -> "mini"
        return name.rpartition("_")[2]
    number, unit, rest = found.groups()
    return f"{number.replace('_', '.')}{unit.upper()}" + (f" {rest.replace('_', ' ')}" if rest else "")


_NEW = "Use torchtune.modules.classifier_model instead."


def classifier_builders(module: str, bases: Mapping[str, Builder]) -> dict[str, Callable[..., nn.Module]]:
    """Make the classifier variants ``x_classifier`` of builders ``x``, as attributes of a module."""
    names = {f"{name}_classifier": base for name, base in bases.items()}
    return exported(module, {name: _classifier_builder(base, name, module) for name, base in names.items()})


def _classifier_builder(base: Builder, name: str, module: str) -> Callable[..., nn.Module]:
    """Make the classifier variant of a builder, with the additional argument ``num_classes``.

    Args:
        base: builder of the language model, with or without LoRA.
        name: name of the new function.
        module: ``__name__`` of the module that exports it.
    """
    own = inspect.signature(base)
    path = f"{base.__module__}.{base.__name__}"
    kind = inspect.Parameter.KEYWORD_ONLY if "lora_attn_modules" in own.parameters else None
    classes = inspect.Parameter("num_classes", kind or inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int)
    rest = [
        parameter if kind else parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own.parameters.values()
    ]
    at = next((i for i, parameter in enumerate(rest) if parameter.kind is kind), len(rest)) if kind else 0
    signature = own.replace(parameters=[*rest[:at], classes, *rest[at:]], return_annotation=nn.Module)

    def builder(*args: Any, **kwargs: Any) -> nn.Module:
        warnings.warn(f"{name} is deprecated. {_NEW}", FutureWarning, stacklevel=2)
        values = dict(signature.bind(*args, **kwargs).arguments)
        return classifier_model(values.pop("num_classes"), path, **values)

    builder.__signature__ = signature
    return dress(builder, name, module, f"Build :func:`{base.__name__}` with ``num_classes`` outputs. {_NEW}")
