"""Builders of models, ``x()``, ``lora_x(...)`` and ``qlora_x(...)``, from a family's table of sizes.

A builder is an ordinary function with a signature, annotations and a docstring, which calls
:func:`torchtune.models.build`.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_type_hints

from torch import nn

from torchtune.models._build import build
from torchtune.models._description import Description
from torchtune.models._spec import ModelSpec
from torchtune.modules.output_projection import classifier_model
from torchtune.modules.transformer import TransformerDecoder

LoraAttnModules = list[Literal["q_proj", "k_proj", "v_proj", "output_proj"]]
Builder = Callable[..., TransformerDecoder]
Model = TypeVar("Model", bound=nn.Module)


def model_builders(
    module: str,
    title: str,
    spec: ModelSpec,
    sizes: Mapping[str, Description],
    *,
    tie_option: bool = False,
) -> dict[str, Builder]:
    """Make the builders ``x``, ``lora_x`` and ``qlora_x`` for every row ``x`` of a family's table.

    Args:
        module: ``__name__`` of the module that exports the builders.
        title: name of the family in docstrings, for example ``"Llama 3"``.
        spec: the model family.
        sizes: builder name -> description.
        tie_option: whether the builders have the argument ``tie_word_embeddings``.

    Returns:
        Name -> builder.
    """
    builders: dict[str, Builder] = {}
    for name, description in sizes.items():
        model_name = f"{title} {_size_in_name(name)}"
        numbers = (
            f"{description.num_layers} layers, {description.embed_dim:,} wide, vocabulary "
            f"{description.vocab_size:,}, up to {description.max_seq_len:,} tokens."
        )
        doc = f"Build {model_name}: {numbers}"
        if tie_option:
            doc += f"\n\n    Args:{_TIE_DOC}\n    "
        base = named_function(_size_builder(spec, description, tie_option), name, module, doc)
        builders[name] = base
        builders[f"lora_{name}"] = lora_builder(base, f"lora_{name}", module, f"{model_name} with LoRA adapters")
        builders[f"qlora_{name}"] = lora_builder(
            base,
            f"qlora_{name}",
            module,
            f"{model_name} with LoRA adapters over a 4-bit base",
            quantize_base=True,
        )
    return builders


def _size_builder(spec: ModelSpec, description: Description, tie_option: bool) -> Builder:
    """Make the builder of one row; a function of its own, so that each builder keeps its own description."""

    def builder() -> TransformerDecoder:
        return build(description, spec)

    def tying_builder(tie_word_embeddings: bool = True) -> TransformerDecoder:
        return build(replace(description, tie_word_embeddings=tie_word_embeddings), spec)

    return tying_builder if tie_option else builder


def _size_in_name(name: str) -> str:
    """Return the size in a builder's name: ``"1.5B instruct"`` for ``"qwen2_5_1_5b_instruct"``."""
    name = name.replace("_3_1_", "_3.1_")  # Mistral Small 3.1 24B: the version is not a part of the size
    # "8x7b", or a number with at most one decimal place, then "b" or "m", then words such as "instruct"
    match = re.search(r"(?:^|_)(\d+x\d+|\d(?:_\d+)?|\d+)([bm])(?:_(\w+))?$", name)
    if match is None:  # "phi3_mini" -> "mini"
        return name.rpartition("_")[2]
    number, unit, words = match.groups()
    size = number.replace("_", ".") + unit.upper()
    return size if words is None else f"{size} {words.replace('_', ' ')}"


# Arguments of component builders: type, and description in docstrings.
_ARGUMENTS: dict[str, tuple[type, str]] = {
    "vocab_size": (int, "number of tokens."),
    "num_layers": (int, "number of layers."),
    "num_heads": (int, "query heads per layer."),
    "head_dim": (int, "head dimension; by default ``embed_dim // num_heads``."),
    "num_kv_heads": (int, "key and value heads per layer."),
    "embed_dim": (int, "width of the residual stream."),
    "intermediate_dim": (int, "width of the feed-forward layers; by default computed from ``embed_dim``."),
    "max_seq_len": (int, "longest sequence."),
    "attn_dropout": (float, "dropout probability of attention weights; must be 0 with a soft cap."),
    "norm_eps": (float, "eps of the norms."),
    "rope_base": (float, "base (theta) of the rotary embeddings."),
    "hidden_capping_value": (float, "bound of attention's scores."),
    "final_capping_value": (float, "bound of the logits."),
    "sliding_window_size": (int, "sliding window of layers 0, 2, 4 …, in positions."),
    "query_pre_attn_scalar": (
        int,
        "attention scores are scaled by its inverse square root; by default ``head_dim``.",
    ),
    "scale_factor": (float, "factor of Llama 3.1's RoPE scaling; ``None``, as in SmolLM 2, for no scaling."),
    "tie_word_embeddings": (bool, "whether the output projection shares its weight with the embeddings."),
    "q_proj_bias": (bool, "whether the query projection has a bias; likewise for the next two."),
    "k_proj_bias": (bool, "see ``q_proj_bias``."),
    "v_proj_bias": (bool, "see ``q_proj_bias``."),
    "q_norm": (bool, "whether queries are normalized per head (before RoPE in Qwen 3, else after it)."),
    "k_norm": (bool, "whether keys are normalized per head; must equal ``q_norm``."),
}


def component_builders(
    module: str,
    name: str,
    title: str,
    spec: ModelSpec,
    describe: Callable[..., Description],
    required: Sequence[str],
    **defaults: Any,
) -> dict[str, Builder]:
    """Make the builders of a family from the sizes of a model, such as ``llama3`` and ``lora_llama3``.

    Args:
        module: ``__name__`` of the module that exports the builders.
        name: name of the plain builder; the one with adapters is ``lora_<name>``.
        title: name of the family in docstrings.
        spec: the model family.
        describe: makes the description from the arguments of the builder.
        required: names of the arguments without a default; they come first in the signature.
        **defaults: names and defaults of the other arguments.

    Returns:
        The builders ``name`` and ``lora_name``.
    """
    parameters = []
    docs = ""
    for argument in (*required, *defaults):
        annotation, doc = _ARGUMENTS[argument]
        default = defaults.get(argument, inspect.Parameter.empty)
        if default is None:
            annotation = annotation | None
        parameters.append(
            inspect.Parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
        )
        docs += f"\n        {argument}: {doc}"
    signature = inspect.Signature(parameters, return_annotation=TransformerDecoder)

    def builder(*args: Any, **kwargs: Any) -> TransformerDecoder:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        sizes = dict(bound.arguments)
        if not sizes["intermediate_dim"]:  # None or 0
            sizes["intermediate_dim"] = scale_hidden_dim_for_mlp(sizes["embed_dim"])
        return build(describe(**sizes), spec)

    _set_signature(builder, signature)
    named_function(
        builder, name, module, f"Build a decoder of the {title} family from its sizes.\n\n    Args:{docs}\n    "
    )
    lora_name = f"lora_{name}"
    lora = lora_builder(builder, lora_name, module, f"a {title} decoder with LoRA adapters from its sizes")
    return {name: builder, lora_name: lora}


def scale_hidden_dim_for_mlp(dim: int, multiple_of: int = 256) -> int:
    """Return the width of Llama's feed-forward layers: two thirds of ``4 * dim``, rounded up to a multiple."""
    hidden_dim = int(2 * (4 * dim) / 3)
    num_multiples = -(-hidden_dim // multiple_of)  # rounded up
    return num_multiples * multiple_of


_LORA_DOC = """
    Args:
        lora_attn_modules: attention projections with an adapter; in mixers, ``q_proj``, ``k_proj`` and ``v_proj``
            mean the projection of the input, in latent attention those to and from latents.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projection has one; it must not be tied to the embeddings.{sizes}
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.{tie}
        train_modules: modules that are trained whole beside the adapters, as in ``torchtune.modules.peft.LoRA``.
    """
_SIZES_DOC = "\n        (sizes of the model): as in :func:`{base}`."
_TIE_DOC = "\n        tie_word_embeddings: whether the output projection shares its weight with the embeddings."


def lora_builder(base: Builder, name: str, module: str, noun: str, *, quantize_base: bool = False) -> Builder:
    """Make the LoRA variant of a builder: the arguments of :func:`add_lora`, and those of the base builder.

    Args:
        base: builder without an adapter.
        name: name of the new function.
        module: ``__name__`` of the module that exports it.
        noun: name of the built model, for the docstring.
        quantize_base: default of the argument ``quantize_base``.
    """
    base_parameters = _annotated_parameters(base)
    adapter_parameters = _annotated_parameters(add_lora)
    del adapter_parameters["model"]
    adapter_parameters["quantize_base"] = adapter_parameters["quantize_base"].replace(default=quantize_base)
    # A builder of a named size has at most an option, with a default; one from sizes requires them.
    takes_sizes = any(parameter.default is inspect.Parameter.empty for parameter in base_parameters.values())
    if takes_sizes:
        parameters = _lora_parameters_with_sizes(base_parameters, adapter_parameters)
    else:
        # At the end, because earlier releases do not have it.
        train_modules = adapter_parameters.pop("train_modules")
        parameters = [*adapter_parameters.values(), *base_parameters.values(), train_modules]
        adapter_parameters["train_modules"] = train_modules  # the builder below passes it to add_lora
    signature = inspect.Signature(parameters, return_annotation=TransformerDecoder)

    def builder(*args: Any, **kwargs: Any) -> TransformerDecoder:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        model = base(**{argument: bound.arguments[argument] for argument in base_parameters})
        return add_lora(model, **{argument: bound.arguments[argument] for argument in adapter_parameters})

    _set_signature(builder, signature)
    sizes_doc = ""
    tie_doc = ""
    if takes_sizes:
        sizes_doc = _SIZES_DOC.format(base=base.__name__)
    elif "tie_word_embeddings" in base_parameters:
        tie_doc = _TIE_DOC
    doc = f"Build {noun}.\n{_LORA_DOC.format(sizes=sizes_doc, tie=tie_doc)}"
    return named_function(builder, name, module, doc)


def _lora_parameters_with_sizes(
    base_parameters: Mapping[str, inspect.Parameter], adapter_parameters: Mapping[str, inspect.Parameter]
) -> list[inspect.Parameter]:
    """Return the parameters of ``lora_llama3`` and the like, in the order of earlier releases.

    The first three may be positional; sizes, rank and alpha have no default.
    """
    positional = ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output")
    keywords = dict(base_parameters)
    for argument, parameter in adapter_parameters.items():
        if argument in ("lora_rank", "lora_alpha"):
            parameter = parameter.replace(default=inspect.Parameter.empty)
        if argument not in positional:
            keywords[argument] = parameter
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in keywords.values()]
    return [*(adapter_parameters[argument] for argument in positional), *keyword_only]


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
    train_modules: list[str] | None = None,
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
        train_modules=train_modules,
    )
    return convert_to_lora(model, lora, quantize_base)


def convert_to_lora(model: Model, lora: Any, quantize_base: bool) -> Model:
    """Apply a :class:`~torchtune.modules.peft.LoRA` conversion, after quantizing the base if asked, and return it."""
    from torchtune.modules.conversion import apply_conversions
    from torchtune.modules.low_precision import QuantizeBase

    conversions = [lora]
    if quantize_base:
        conversions = [QuantizeBase(), lora]
    apply_conversions(model, conversions)
    return model


# Compatibility: builders of classifiers, which earlier releases already deprecated.
_CLASSIFIER_NOTE = "Use torchtune.modules.classifier_model instead."


def classifier_builders(module: str, bases: Mapping[str, Builder]) -> dict[str, Callable[..., nn.Module]]:
    """Make the classifier variants ``x_classifier`` of builders ``x``, which ``module`` exports."""
    builders = {}
    for base_name, base in bases.items():
        name = f"{base_name}_classifier"
        builders[name] = _classifier_builder(base, name, module)
    return builders


def _classifier_builder(base: Builder, name: str, module: str) -> Callable[..., nn.Module]:
    """Make the classifier variant of a builder, with the additional argument ``num_classes``.

    ``num_classes`` comes first; in LoRA builders, it is the first keyword-only argument.

    Args:
        base: builder of the language model, with or without LoRA.
        name: name of the new function.
        module: ``__name__`` of the module that exports it.
    """
    base_signature = inspect.signature(base)
    positional = []  # beside num_classes; only LoRA builders have such parameters
    keyword_only = []
    for parameter in base_signature.parameters.values():
        if "lora_attn_modules" in base_signature.parameters and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            positional.append(parameter)
        else:
            keyword_only.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    kind = inspect.Parameter.KEYWORD_ONLY if positional else inspect.Parameter.POSITIONAL_OR_KEYWORD
    num_classes = inspect.Parameter("num_classes", kind, annotation=int)
    signature = base_signature.replace(
        parameters=[*positional, num_classes, *keyword_only], return_annotation=nn.Module
    )
    base_path = f"{base.__module__}.{base.__name__}"

    def builder(*args: Any, **kwargs: Any) -> nn.Module:
        warnings.warn(f"{name} is deprecated. {_CLASSIFIER_NOTE}", FutureWarning, stacklevel=2)
        arguments = dict(signature.bind(*args, **kwargs).arguments)  # without defaults, which the base fills in
        return classifier_model(arguments.pop("num_classes"), base_path, **arguments)

    builder.__signature__ = signature
    doc = f"Build :func:`{base.__name__}` with ``num_classes`` outputs. {_CLASSIFIER_NOTE}"
    return named_function(builder, name, module, doc)


def named_function(function: Builder, name: str, module: str, doc: str) -> Builder:
    """Give a function the name, module and docstring under which it is exported, and return it."""
    function.__name__ = name
    function.__qualname__ = name
    function.__module__ = module
    function.__doc__ = doc
    return function


def _annotated_parameters(function: Builder) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function by name, with types instead of names of types as annotations."""
    hints = get_type_hints(function)
    parameters = {}
    for name, parameter in inspect.signature(function).parameters.items():
        parameters[name] = parameter.replace(annotation=hints[name])
    return parameters


def _set_signature(function: Builder, signature: inspect.Signature) -> None:
    """Set the signature of a function that takes ``*args`` and ``**kwargs``, and the annotations to match."""
    # inspect and the checks of configs read the signature, get_type_hints reads the annotations.
    function.__signature__ = signature
    annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    function.__annotations__ = {**annotations, "return": signature.return_annotation}
