"""Compatibility: name of the tensor-parallel plan in older configs."""

from typing import TYPE_CHECKING

from torch import nn

from torchtune.models.llama3._parallelism import base_llama_tp_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def decoder_only_tp_plan(
    model: nn.Module, *, inference: bool = False, enable_fp8_training: bool = False
) -> dict[str, "ParallelStyle"]:
    """Make the tensor-parallel plan of a decoder; configs of Llama 4 use this name.

    Args:
        model: as for :func:`torchtune.models.llama3.base_llama_tp_plan`.
        inference: must be False.
        enable_fp8_training: must be False.

    Raises:
        ModelError: ``inference`` or ``enable_fp8_training`` is True.
        ParallelError: the model has experts, as both sizes of Llama 4 do. Shard their weights over data-parallel ranks
            with ``tensor_parallel_dim: 1``.
    """
    return base_llama_tp_plan(model, inference=inference, enable_fp8_training=enable_fp8_training)
