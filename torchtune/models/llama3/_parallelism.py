"""Compatibility: the tensor-parallel plan under the name that configs give it."""

from typing import TYPE_CHECKING

from torch import nn

from torchtune.models._description import ModelError
from torchtune.models._parallel_plan import decoder_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def base_llama_tp_plan(
    model: nn.Module, *, inference: bool = False, enable_fp8_training: bool = False
) -> dict[str, "ParallelStyle"]:
    """How a Llama is split over a tensor-parallel group; every model has this plan without being told.

    Args:
        model: a :class:`torchtune.modules.TransformerDecoder`.
        inference: refused: generation runs on one device.
        enable_fp8_training: refused: there is no training in float8.

    Raises:
        ModelError: one of the two was asked for.
    """
    for name, value in (("inference", inference), ("enable_fp8_training", enable_fp8_training)):
        if value:
            raise ModelError(f"base_llama_tp_plan: {name}=True is not available: leave it out.")
    return decoder_plan(model)
