"""Small pieces that datasets, models and scripts written for earlier releases import."""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from torchtune.config import Document, apply_overrides, read_document
from torchtune.modules import FeedForward, FrozenNF4Linear, RMSNorm
from torchtune.modules.kernels.flex import compile_flex_attention
from torchtune.modules.loss import CEWithChunkedOutputLoss, LinearCrossEntropyLoss
from torchtune.modules.loss.custom_loss import LogitsLoss
from torchtune.modules.peft import DoRALinear, get_lora_module_names
from torchtune.utils import UserError

# A switch that older recipes set. It has no effect: grouped products choose their kernel by device and dtype.
use_grouped_mm = True
# A row of packed documents: tokens, labels, positions and lengths.
PACK_TYPE = dict[str, Tensor | list[int]]


class TuneRecipeArgumentParser(argparse.ArgumentParser):
    """Argument parser whose defaults are the settings of the file ``--config``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_argument("--config", type=str, required=True, help="path of a config")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        """Return the settings of the file, and the overrides ``key=value`` and ``~key``.

        Raises:
            UserError: the file cannot be read, or an argument is neither an option nor an override.
        """
        given, overrides = super().parse_known_args(*args, **kwargs)
        for argument in overrides:
            if argument.startswith("-"):
                raise UserError(f"{argument} is not an option of a recipe: settings are written key=value.")
        document = read_document(given.config)
        document.check()
        del given.config
        return argparse.Namespace(**{**document.data, **vars(given)}), overrides


def _merge_yaml_and_cli_args(yaml_args: argparse.Namespace, cli_args: Sequence[str]) -> Any:
    """Return the settings of a file with overrides applied, as a ``DictConfig``.

    Raises:
        ConfigError: an override cannot be applied.
    """
    from omegaconf import OmegaConf

    document = Document(dict(vars(yaml_args)))
    apply_overrides(document, cli_args)
    document.check()
    return OmegaConf.create(document.data)


@contextmanager
def keep_row_losses() -> Iterator[list[Tensor]]:
    """Record the losses of single tokens inside the block: losses append them, detached [n], to the yielded list.

    Recipes give a list to ``sum_and_count`` as ``row_losses`` instead.

    Example:
        >>> from torchtune.compat import keep_row_losses
        >>> loss, labels = torchtune.modules.loss.LinearCrossEntropyLoss(), torch.tensor([[5, -100, 7]])
        >>> with keep_row_losses() as kept:
        ...     total, count = loss.sum_and_count(torch.randn(1, 3, 8), labels, torch.nn.Linear(8, 16, bias=False))
        >>> len(torch.cat(kept)) == int(count) == 2
        True
    """
    kept: list[Tensor] = []

    def recording(sum_and_count: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        @functools.wraps(sum_and_count)
        def record(*args: Any, row_losses: list[Tensor] | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
            losses: list[Tensor] = []
            total, count = sum_and_count(*args, row_losses=losses, **kwargs)
            kept.extend(losses)
            if row_losses is not None:
                row_losses.extend(losses)
            return total, count

        return record

    methods = {kind: kind.sum_and_count for kind in (CEWithChunkedOutputLoss, LinearCrossEntropyLoss, LogitsLoss)}
    for kind, method in methods.items():
        kind.sum_and_count = recording(method)
    try:
        yield kept
    finally:
        for kind, method in methods.items():
            kind.sum_and_count = method


def should_use_grouped_mm() -> bool:
    """Return True; see :data:`use_grouped_mm`."""
    return use_grouped_mm


def chain(*funcs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that applies ``funcs`` in order."""

    def chained(value: Any) -> Any:
        for function in funcs:
            value = function(value)
        return value

    return chained


def update_stop_tokens_tracker(tokens: Tensor, stop_tokens: Tensor, stop_token_reached: Tensor) -> Tensor:
    """Mark the sequences whose newest token is a stop token.

    Args:
        tokens: newest token of each sequence, ``[b, 1]``.
        stop_tokens: ids of stop tokens, ``[n]``.
        stop_token_reached: sequences that have ended, bool ``[b]``; changed in place.
    """
    stop_token_reached |= torch.isin(tokens, stop_tokens).flatten()
    return stop_token_reached


def swiglu_mlp(dim: int, hidden_dim: int, quantize_base: bool = False, **quantization_kwargs: Any) -> FeedForward:
    """Build the feed-forward layer of Llama, Mistral, Phi and Qwen: three matrices without biases, and SiLU.

    Args:
        dim: width of the model.
        hidden_dim: width of the layer.
        quantize_base: store the weights as NF4.
        **quantization_kwargs: arguments of :class:`torchtune.modules.low_precision.FrozenNF4Linear`.
    """

    def linear(inputs: int, outputs: int) -> nn.Module:
        if quantize_base:
            return FrozenNF4Linear(inputs, outputs, bias=False, **quantization_kwargs)
        return nn.Linear(inputs, outputs, bias=False)

    return FeedForward(
        gate_proj=linear(dim, hidden_dim), down_proj=linear(hidden_dim, dim), up_proj=linear(dim, hidden_dim)
    )


class GemmaRMSNorm(RMSNorm):
    """:class:`torchtune.modules.RMSNorm` that scales by ``1 + scale``."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps, unit_offset=True)


def _sdpa_or_flex_attention() -> Callable[..., Tensor]:
    """Return a function of query, key, value, mask, dropout and causality: FlexAttention for block masks, else SDPA."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, dropout_p: float, is_causal: bool
    ) -> Tensor:
        if isinstance(mask, BlockMask):
            if dropout_p > 0:
                raise ValueError("FlexAttention has no dropout: set attn_dropout to 0.")
            return compile_flex_attention()(q, k, v, block_mask=mask)
        if mask is not None and mask.dim() == 3:
            mask = mask[:, None]  # the same for all heads
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal)

    return attend


def load_dora_magnitudes(model: nn.Module) -> None:
    """Set the magnitudes of DoRA layers from their weights, after the weights were loaded."""
    for module in model.modules():
        if isinstance(module, DoRALinear):
            module.initialize_dora_magnitude()


def validate_state_dict_for_lora(
    lora_attn_modules: Sequence[str],
    apply_lora_to_mlp: bool,
    apply_lora_to_output: bool,
    full_model_state_dict_keys: Sequence[str],
    lora_state_dict_keys: Sequence[str] | None = None,
    base_model_state_dict_keys: Sequence[str] | None = None,
) -> None:
    """Check that the keys of an adapter and of a base model are together those of the adapted model.

    Args:
        lora_attn_modules: attention projections with an adapter.
        apply_lora_to_mlp: whether feed-forward layers have an adapter.
        apply_lora_to_output: whether the output projection has an adapter.
        full_model_state_dict_keys: keys of the adapted model.
        lora_state_dict_keys: keys of the adapter, checked if given.
        base_model_state_dict_keys: keys of the base model, checked if given.

    Raises:
        AssertionError: keys are missing or unexpected.
    """
    modules = get_lora_module_names(list(lora_attn_modules), apply_lora_to_mlp, apply_lora_to_output)
    marks = [f"{module}.{part}" for module in modules for part in ("lora", "magnitude")]
    adapter = {key for key in full_model_state_dict_keys if any(mark in key for mark in marks)}
    base = set(full_model_state_dict_keys) - adapter
    for kind, given, expected in (
        ("adapter", lora_state_dict_keys, adapter),
        ("base model", base_model_state_dict_keys, base),
    ):
        if given is not None and set(given) != expected:
            missing, unexpected = sorted(expected - set(given))[:3], sorted(set(given) - expected)[:3]
            raise AssertionError(f"The {kind} does not fit the model: missing {missing}, unexpected {unexpected}.")
