"""Builders of the parts of Llama 3.2 Vision, with the arguments of earlier releases.

Only recipes and configs of earlier releases need this file. New code builds the whole model, with the builder of its
size or with :func:`torchtune.load`, and adapts it with :class:`torchtune.modules.peft.LoRA`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torchtune.models._builders import Model, named_function, scale_hidden_dim_for_mlp
from torchtune.models._description import Description, Llama3RopeScaling
from torchtune.models.llama3_2_vision._model import adapt, build_decoder, llama3_2_vision_encoder
from torchtune.modules.transformer import TransformerDecoder


def llama3_2_vision_decoder(
    *,
    vocab_size: int,
    num_layers: int,
    fusion_interval: int,
    num_special_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    max_seq_len: int,
    encoder_max_seq_len: int,
    rope_base: float = 500_000.0,
    intermediate_dim: int | None = None,
) -> TransformerDecoder:
    """Build the text decoder with its cross-attention layers.

    Args:
        vocab_size: number of tokens.
        num_layers: number of self-attention layers.
        fusion_interval: every ``fusion_interval``-th layer has cross-attention before it.
        num_special_tokens: number of additional tokens, with embeddings that are trained with the fusion.
        num_heads: query heads per layer.
        num_kv_heads: key and value heads per layer.
        embed_dim: width of the residual stream.
        max_seq_len: maximum sequence length.
        encoder_max_seq_len: informational; caches take their size from the encoder's output.
        rope_base: base (theta) of the rotary embeddings.
        intermediate_dim: width of the feed-forward layers; by default computed from ``embed_dim``.
    """
    text = Description(
        vocab_size=vocab_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim or scale_hidden_dim_for_mlp(embed_dim),
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        rope_base=rope_base,
        rope_scaling=Llama3RopeScaling(),
    )
    return build_decoder(text, range(fusion_interval - 1, num_layers, fusion_interval), num_special_tokens)


def _lora_part_builder(base: Callable[..., Model], part: str, noun: str) -> Callable[..., Model]:
    """Make the LoRA variant of the builder of a part.

    Its first arguments say which layers have adapters; the others, those of ``base`` and of :func:`adapt`, are
    keyword-only.

    Args:
        base: builder of the part without adapters.
        part: name of the part, which can have adapters beside its fusion layers.
        noun: name of the built model, for the docstring.
    """
    positional = []
    for adapted_part in (part, "fusion"):
        flag = inspect.Parameter(f"{adapted_part}_lora", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=bool)
        positional.append(flag)
    base_parameters = inspect.signature(base).parameters
    keyword_only = list(base_parameters.values())
    adapter_parameters = dict(inspect.signature(adapt).parameters)
    del adapter_parameters["model"], adapter_parameters["parts"]
    for parameter in adapter_parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            keyword_only.append(parameter)
        else:
            positional.append(parameter)
    signature = inspect.signature(base).replace(parameters=[*positional, *keyword_only])

    def builder(*args: Any, **kwargs: Any) -> Model:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        parts = {part: values[f"{part}_lora"], "fusion": values["fusion_lora"]}
        model = base(**{argument: values[argument] for argument in base_parameters})
        return adapt(model, parts, **{argument: values[argument] for argument in adapter_parameters})

    builder.__signature__ = signature
    doc = (
        f"Build {noun}.\n\n    The other arguments are those of :func:`{base.__name__}` and of the ``lora_*`` "
        "builders.\n    "
    )
    return named_function(builder, f"lora_{base.__name__}", __name__, doc)


lora_llama3_2_vision_decoder = _lora_part_builder(
    llama3_2_vision_decoder,
    "decoder",
    "the text decoder with LoRA adapters on its self-attention layers, cross-attention layers, or both",
)
lora_llama3_2_vision_encoder = _lora_part_builder(
    llama3_2_vision_encoder,
    "encoder",
    "the image encoder with LoRA adapters on CLIP, on the projection head, or on both",
)
