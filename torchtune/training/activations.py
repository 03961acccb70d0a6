"""Selective activation checkpointing: recompute element-wise operations, keep attention and some matrix products."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtune.modules.transformer import TransformerSelfAttentionLayer, text_decoder
from torchtune.training.memory import checkpoint_module, set_activation_checkpointing
from torchtune.utils import UserError, onednn_linear_op, reduce_scatter_op


class ActivationCheckpointingError(UserError, ValueError):
    """Invalid mode or option of activation checkpointing."""


def _attention_ops() -> set[Any]:
    """Return the operations of attention and of tensor parallelism whose outputs are saved."""
    names = (
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
    )
    ops = {torch.ops.higher_order.flex_attention, reduce_scatter_op()}
    for name in names:
        if hasattr(torch.ops.aten, name):  # not every release of torch has all kernels
            ops.add(getattr(torch.ops.aten, name).default)
    return ops


def _matmul_ops() -> set[Any]:
    ops = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
    onednn_linear = onednn_linear_op()
    if onednn_linear is not None:
        ops.add(onednn_linear)
    return ops


class _EveryOtherMatmul:
    """Policy that saves attention and every other matrix product; one instance per checkpointed forward."""

    def __init__(self) -> None:
        self.attention_ops = _attention_ops()
        self.matmul_ops = _matmul_ops()
        # Matrix products so far in the forward (False) and in its recomputation (True), which must save the same ones.
        self.matmuls = {False: 0, True: 0}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in self.matmul_ops:
            self.matmuls[ctx.is_recompute] += 1
            keep = self.matmuls[ctx.is_recompute] % 2 == 1
        else:
            keep = op in self.attention_ops
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _every_other_matmul() -> Any:
    return create_selective_checkpoint_contexts(_EveryOtherMatmul())


def checkpoint_wrapper(module: torch.nn.Module, ac_mode: str, ac_style: int | str | None) -> torch.nn.Module:
    """Checkpoint one module in place.

    Args:
        module: usually a layer.
        ac_mode: ``"full"`` recomputes everything, ``"selective"`` follows ``ac_style``.
        ac_style: ``"op"`` saves attention and every other matrix product; for an integer, the module is recomputed as a
            whole, because the caller already selects every n-th layer.

    Raises:
        ActivationCheckpointingError: the mode or option is unknown.
    """
    if ac_mode == "full" or (ac_mode == "selective" and isinstance(ac_style, int)):
        return checkpoint_module(module)
    if ac_mode == "selective" and ac_style == "op":
        return checkpoint_module(module, context_fn=_every_other_matmul)
    raise ActivationCheckpointingError(
        f"ac_mode={ac_mode!r} with ac_option={ac_style!r} is not known: use ac_mode 'full', or 'selective' with "
        "ac_option 'op' or a number n for every n-th layer."
    )


def checkpoint_activations(
    model: torch.nn.Module, every_layer: bool, ac_mode: str | None = None, ac_option: int | str | None = None
) -> None:
    """Apply activation checkpointing according to a recipe's settings.

    Args:
        model: a decoder or a composite model; its layers are changed in place.
        every_layer: recompute every transformer layer, including encoder layers.
        ac_mode: see :func:`apply_selective_activation_checkpointing`; excludes ``every_layer``.
        ac_option: see :func:`apply_selective_activation_checkpointing`.

    Raises:
        ActivationCheckpointingError: both ways are enabled, or the mode or option is unknown.

    Example:
        >>> torchtune.training.checkpoint_activations(model, True)
        >>> model(torch.tensor([[5, 40, 7]])).sum().backward()
    """
    if every_layer and ac_mode is not None:
        raise ActivationCheckpointingError("ac_mode: set it or enable_activation_checkpointing, not both.")
    if every_layer:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    apply_selective_activation_checkpointing(model, ac_mode, ac_option)


def apply_selective_activation_checkpointing(
    model: torch.nn.Module, ac_mode: str | None, ac_option: int | str | None
) -> None:
    """Checkpoint the layers of the text decoder in place.

    Args:
        model: a decoder.
        ac_mode: ``"full"`` recomputes every layer; ``"selective"`` follows ``ac_option``; None or ``"none"``: off.
        ac_option: ``"op"`` saves attention and every other matrix product in every layer; a number ``n`` (or its
            string) recomputes every n-th layer as a whole.

    Raises:
        ActivationCheckpointingError: the mode or option is unknown.
    """
    if ac_mode is None or ac_mode == "none":
        return
    interval = 1
    if ac_mode == "selective" and str(ac_option).isdigit():
        ac_option = int(ac_option)
        interval = ac_option
    if interval < 1:
        raise ActivationCheckpointingError(f"ac_option={ac_option!r} must be at least 1.")
    for number, layer in enumerate(text_decoder(model).layers, start=1):
        if number % interval == 0:
            checkpoint_wrapper(layer, ac_mode, ac_option)
