"""Compatibility: name of the tensor-parallel plan in older configs."""

from typing import TYPE_CHECKING

from torch import nn

from torchtune.models._description import ModelError
from torchtune.models._parallel_plan import decoder_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def base_llama_tp_plan(
    model: nn.Module, *, inference: bool = False, enable_fp8_training: bool = False
) -> dict[str, "ParallelStyle"]:
    """Make the tensor-parallel plan of Llama, which models use by default.

    Args:
        model: a :class:`torchtune.modules.TransformerDecoder`.
        inference: must be False: generation runs on one device.
        enable_fp8_training: must be False: float8 training is not supported.

    Raises:
        ModelError: ``inference`` or ``enable_fp8_training`` is True.
    """
    for name, value in (("inference", inference), ("enable_fp8_training", enable_fp8_training)):
        if value:
            raise ModelError(f"tensor_parallel_plan: {name}=True is not available: leave it out.")
    return decoder_plan(model)
