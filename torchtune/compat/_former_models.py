"""Models of earlier releases: layers, masks, padding of images, checks of adapters, weights, and fake quantization."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from torchtune.checkpoints import CheckpointError
from torchtune.data import DataError
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
from torchtune.modules import FeedForward, FrozenNF4Linear, RMSNorm
from torchtune.modules.kernels.flex import compile_flex_attention
from torchtune.modules.loss import CEWithChunkedOutputLoss, LinearCrossEntropyLoss
from torchtune.modules.loss.custom_loss import LogitsLoss
from torchtune.modules.low_precision import reparametrize_as_dtype_state_dict_post_hook
from torchtune.modules.low_precision.layers import set_fake_quant
from torchtune.modules.low_precision.quantizers import (
    QAT_QUANTIZERS,
    Int4WeightOnlyQATQuantizerModuleSwap,
    Int8DynActInt4WeightQATQuantizerModuleSwap,
)
from torchtune.modules.peft import DoRALinear, LoRALinear, QATLoRALinear, get_lora_module_names

# Name in files -> name in models, with {} for the layer. Weight maps (torchtune.models.WeightMap) replace these tables:
# checkpointers do not read them.
_FROM_HF = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attn.q_proj.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attn.k_proj.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attn.v_proj.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attn.output_proj.weight",
    "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.mlp.w1.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.mlp.w3.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.mlp.w2.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.sa_norm.scale",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "output.weight",
}
_FROM_META = {
    "tok_embeddings.weight": "tok_embeddings.weight",
    "norm.weight": "norm.scale",
    "output.weight": "output.weight",
    "layers.{}.attention.wq.weight": "layers.{}.attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "layers.{}.attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "layers.{}.attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "layers.{}.attn.output_proj.weight",
    "layers.{}.attention_norm.weight": "layers.{}.sa_norm.scale",
    "layers.{}.ffn_norm.weight": "layers.{}.mlp_norm.scale",
    "layers.{}.feed_forward.w1.weight": "layers.{}.mlp.w1.weight",
    "layers.{}.feed_forward.w2.weight": "layers.{}.mlp.w2.weight",
    "layers.{}.feed_forward.w3.weight": "layers.{}.mlp.w3.weight",
    "layers.{}.attention.wq.lora_a.weight": "layers.{}.attn.q_proj.lora_a.weight",
    "layers.{}.attention.wq.lora_b.weight": "layers.{}.attn.q_proj.lora_b.weight",
    "layers.{}.attention.wk.lora_a.weight": "layers.{}.attn.k_proj.lora_a.weight",
    "layers.{}.attention.wk.lora_b.weight": "layers.{}.attn.k_proj.lora_b.weight",
    "layers.{}.attention.wv.lora_a.weight": "layers.{}.attn.v_proj.lora_a.weight",
    "layers.{}.attention.wv.lora_b.weight": "layers.{}.attn.v_proj.lora_b.weight",
    "layers.{}.attention.wo.lora_a.weight": "layers.{}.attn.output_proj.lora_a.weight",
    "layers.{}.attention.wo.lora_b.weight": "layers.{}.attn.output_proj.lora_b.weight",
}
_TO_PEFT_KEYS = {"lora_a": "lora_A", "lora_b": "lora_B", "magnitude": "lora_magnitude_vector"}


def update_stop_tokens_tracker(tokens: Tensor, stop_tokens: Tensor, stop_token_reached: Tensor) -> Tensor:
    """Mark the sequences that end with a stop token.

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
    module_names = get_lora_module_names(list(lora_attn_modules), apply_lora_to_mlp, apply_lora_to_output)
    adapter_keys = set()
    for key in full_model_state_dict_keys:
        for name in module_names:
            if f"{name}.lora" in key or f"{name}.magnitude" in key:
                adapter_keys.add(key)
    base_keys = set(full_model_state_dict_keys) - adapter_keys
    if lora_state_dict_keys is not None:
        _check_keys("adapter", set(lora_state_dict_keys), adapter_keys)
    if base_model_state_dict_keys is not None:
        _check_keys("base model", set(base_model_state_dict_keys), base_keys)


def _check_keys(kind: str, keys: set[str], expected_keys: set[str]) -> None:
    missing = sorted(expected_keys - keys)
    unexpected = sorted(keys - expected_keys)
    if missing or unexpected:
        raise AssertionError(f"The {kind} does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}.")


def _unavailable(name: str) -> Callable[..., Any]:
    """Return a function that raises and names its replacement; copied checkpointers import such functions."""

    def convert(*args: Any, **kwargs: Any) -> Any:
        raise CheckpointError(
            f"{name} is not part of this library: torchtune.training.FullModelHFCheckpointer and "
            "FullModelMetaCheckpointer read and write all models."
        )

    convert.__name__ = name
    return convert


llama3_vision_hf_to_tune = _unavailable("llama3_vision_hf_to_tune")
llama3_vision_tune_to_hf = _unavailable("llama3_vision_tune_to_hf")
llama3_vision_meta_to_tune = _unavailable("llama3_vision_meta_to_tune")
llama3_vision_tune_to_meta = _unavailable("llama3_vision_tune_to_meta")
llama4_hf_to_tune = _unavailable("llama4_hf_to_tune")
llama4_tune_to_hf = _unavailable("llama4_tune_to_hf")
llama4_meta_to_tune = _unavailable("llama4_meta_to_tune")
llama4_tune_to_meta = _unavailable("llama4_tune_to_meta")
clip_text_hf_to_tune = _unavailable("clip_text_hf_to_tune")
t5_encoder_hf_to_tune = _unavailable("t5_encoder_hf_to_tune")


def pad_dim_to_size(input: Tensor, size: int, dim: int, *, fill: float = 0.0) -> Tensor:
    """Pad one dimension of a tensor at its end. Batches of images are padded by their collate function today.

    Args:
        input: tensor of any shape.
        size: size of the dimension after padding.
        dim: dimension to pad.
        fill: padding value.

    Raises:
        DataError: the dimension is longer than ``size``.

    Example:
        >>> from torchtune.compat import pad_dim_to_size
        >>> pad_dim_to_size(torch.ones(1, 2), 3, 0).shape
        torch.Size([3, 2])
    """
    num_missing = size - input.shape[dim]
    if num_missing < 0:
        raise DataError(f"Dimension {dim} of a tensor {tuple(input.shape)} is longer than the size {size} to pad to.")
    # F.pad takes two numbers for each dimension, from the last one to the first.
    num_dims_behind = input.dim() - 1 - dim % input.dim()
    return F.pad(input, (0, 0) * num_dims_behind + (0, num_missing), value=fill)


# A switch that older recipes set. It has no effect: grouped products choose their kernel by device and dtype.
use_grouped_mm = True

# Another one, of LoRA recipes, which chose one of two hooks for the state dict; there is one today.
_use_low_cpu_ram = False
_low_ram_reparametrize_as_dtype_state_dict_post_hook = reparametrize_as_dtype_state_dict_post_hook


@contextmanager
def keep_row_losses() -> Iterator[list[Tensor]]:
    """Record the losses of single tokens inside the block: losses append them, detached [n], to the yielded list.

    Recipes give a list to ``sum_and_count`` as ``row_losses`` instead.

    Example:
        >>> from torchtune.compat import keep_row_losses
        >>> loss, labels = torchtune.modules.loss.LinearCrossEntropyLoss(), torch.tensor([[5, -100, 7]])
        >>> with keep_row_losses() as recorded:
        ...     total, count = loss.sum_and_count(torch.randn(1, 3, 8), labels, torch.nn.Linear(8, 16, bias=False))
        >>> len(torch.cat(recorded)) == int(count) == 2
        True
    """
    recorded: list[Tensor] = []

    def recording(sum_and_count: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        @wraps(sum_and_count)
        def record(*args: Any, row_losses: list[Tensor] | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
            losses: list[Tensor] = []
            total, count = sum_and_count(*args, row_losses=losses, **kwargs)
            recorded.extend(losses)
            if row_losses is not None:  # the list of a caller with the present interface
                row_losses.extend(losses)
            return total, count

        return record

    # Methods of the classes, because the block does not name its loss; all are read before one is replaced.
    methods = {kind: kind.sum_and_count for kind in (CEWithChunkedOutputLoss, LinearCrossEntropyLoss, LogitsLoss)}
    for kind, method in methods.items():
        kind.sum_and_count = recording(method)
    try:
        yield recorded
    finally:
        for kind, method in methods.items():
            kind.sum_and_count = method


def should_use_grouped_mm() -> bool:
    """Return True; see :data:`use_grouped_mm`."""
    return use_grouped_mm


def get_unmasked_sequence_lengths(mask: Tensor) -> Tensor:
    """Return the index of the last unmasked position of each row; 0 for a row that is fully masked.

    Args:
        mask: bool [b, s], True at padding.

    Returns:
        int64 [b], indices of the last hidden state of each row.

    Example:
        >>> torchtune.training.get_unmasked_sequence_lengths(torch.tensor([[False, False, True]]))
        tensor([1])
    """
    positions = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask, torch.zeros_like(positions), positions).amax(dim=-1)


def reward_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights of a Hugging Face ``…ForSequenceClassification`` to torchtune names; drop ``score.bias``."""
    weights = {name: tensor for name, tensor in state_dict.items() if name != "score.bias"}
    if "score.weight" in weights:
        weights["lm_head.weight"] = weights.pop("score.weight")
    return hf_to_tune(weights, num_heads, num_kv_heads, dim, head_dim)


def reward_tune_to_hf(
    state_dict: dict[str, Tensor], num_heads: int = 32, num_kv_heads: int = 32, dim: int = 4096
) -> dict[str, Tensor]:
    """Convert weights from torchtune names to Hugging Face names; the inverse of :func:`reward_hf_to_tune`."""
    weights = tune_to_hf(state_dict, num_heads, num_kv_heads, dim)
    if "lm_head.weight" in weights:
        weights["score.weight"] = weights.pop("lm_head.weight")
    return weights


def kv_offset_mask_flex(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, offset: int) -> Tensor:
    """Return the causal mask (a flex ``mask_mod``) for queries that start ``offset`` positions into the cache.

    Example:
        >>> from torchtune.compat import kv_offset_mask_flex
        >>> kv_offset_mask_flex(None, None, torch.tensor(0), torch.arange(4), offset=2)
        tensor([ True,  True,  True, False])
    """
    return kv_idx <= q_idx + offset


def causal_mask_flex(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return the causal mask (a flex ``mask_mod``).

    Example:
        >>> from torchtune.compat import causal_mask_flex
        >>> causal_mask_flex(None, None, torch.tensor(1), torch.arange(3))
        tensor([ True,  True, False])
    """
    return q_idx >= kv_idx


def _register_reparametrize_state_dict_hooks(
    module: nn.Module, dtype: torch.dtype = torch.bfloat16, offload_to_cpu: bool = True
) -> None:
    """Make ``module.state_dict()`` return dequantized weights."""
    hook = partial(reparametrize_as_dtype_state_dict_post_hook, dtype=dtype, offload_to_cpu=offload_to_cpu)
    module._register_state_dict_hook(hook)


def slice_str_to_array(slice_str: str, length: int) -> list[bool]:
    """Parse indices and slices, such as ``"0,2"``, ``"1:3"``, ``":-1"`` or ``"0,::2"``, to a mask of ``length`` items.

    Raises:
        ValueError: a part is neither an index nor a slice, or an index is out of range.

    Example:
        >>> from torchtune.compat import slice_str_to_array
        >>> slice_str_to_array("0,2:", 4)
        [True, False, True, True]
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
        if len(numbers) > 3 or numbers == [None]:  # more than two colons, or an empty part
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


# Functions for model.apply, under the names of earlier releases; all modes are enabled and disabled alike.
_enable_linear_fake_quant = set_fake_quant
_disable_linear_fake_quant = partial(set_fake_quant, enabled=False)
enable_4w_fake_quant_module_swap = _enable_linear_fake_quant
enable_8da4w_fake_quant_module_swap = _enable_linear_fake_quant
disable_4w_fake_quant_module_swap = _disable_linear_fake_quant
disable_8da4w_fake_quant_module_swap = _disable_linear_fake_quant

_QAT_MODES = {
    quantizer_class.mode
    for quantizer_class in (
        *QAT_QUANTIZERS,
        Int4WeightOnlyQATQuantizerModuleSwap,
        Int8DynActInt4WeightQATQuantizerModuleSwap,
    )
}


def _get_enable_fake_quant(quantizer_mode: str) -> Callable[[nn.Module], None] | None:
    """Return the function for ``model.apply`` that enables fake quantization; None for a mode without it."""
    return _enable_linear_fake_quant if quantizer_mode in _QAT_MODES else None


def _get_disable_fake_quant(quantizer_mode: str) -> Callable[[nn.Module], None] | None:
    """Return the function for ``model.apply`` that disables fake quantization; None for a mode without it."""
    return _disable_linear_fake_quant if quantizer_mode in _QAT_MODES else None


def swap_lora_linear_with_qat(
    module: nn.Module, activation_qat_config: Any | None = None, weight_qat_config: Any | None = None
) -> None:
    """Replace every LoRA layer of a module by one with fake quantizers, in place.

    Args:
        module: module that contains LoRA layers.
        activation_qat_config: torchao's ``FakeQuantizeConfigBase`` of inputs, or None.
        weight_qat_config: the same for weights with the adapter merged in, or None.

    Raises:
        ConversionError: an adapter has dropout.
    """
    for name, child in module.named_children():
        if type(child) is LoRALinear:
            setattr(module, name, QATLoRALinear.from_lora_linear(child, activation_qat_config, weight_qat_config))
        else:
            swap_lora_linear_with_qat(child, activation_qat_config, weight_qat_config)


def is_fp8_tensorwise_scaling(fp8_recipe_name: str | None) -> bool:
    """Return whether float8 training uses one scale per tensor: the default, or ``"tensorwise"``."""
    return fp8_recipe_name in (None, "tensorwise")


def __getattr__(name: str) -> Any:
    if name == "flex_attention_compiled":  # a name of older releases, which compiled at import
        return compile_flex_attention()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
