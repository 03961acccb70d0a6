"""Facts about a run that need no simulation: model on the meta device, parameters, mesh, tokens per step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune import config
from torchtune.modules.conversion import apply_conversions, full_shapes
from torchtune.training import RecipeSettingsError, SettingsView
from torchtune.training.parallel import ParallelDims
from torchtune.training.precision import (
    PRECISION_STR_TO_DTYPE,
    emulation_warning,
    has_fast_matmul,
    set_default_dtype,
)
from torchtune.utils import parse_device

_ASSUMED_LENGTH = 2048


def arrange(settings: SettingsView, processes: int) -> ParallelDims:
    """Return the parallel dimensions of a recipe.

    Raises:
        ParallelDimsError: the sizes do not fit the number of processes.
        RecipeSettingsError: there are several processes, and the dataclass of a training recipe declares no mesh.
    """
    if "data_parallel_shard_dim" not in settings.declared:
        trains = "optimizer" in settings.declared  # recipes that do not train may use processes in other ways
        if processes > 1 and trains and dataclasses.is_dataclass(settings.source):
            raise RecipeSettingsError(
                f"the recipe runs on one device, but there are {processes} processes: start one, or declare "
                "data_parallel_shard_dim and the other settings of the mesh, as full_finetune_distributed does."
            )
        return ParallelDims()
    return ParallelDims(
        dp_replicate=settings.data_parallel_replicate_dim,
        dp_shard=settings.data_parallel_shard_dim,
        tp=settings.tensor_parallel_dim,
        cp=settings.context_parallel_dim,
        ep=settings.expert_parallel_dim,
        world_size=processes,
    )


def build_on_meta(settings: SettingsView) -> tuple[torch.nn.Module, torch.dtype, list[Any]]:
    """Return (model on the meta device, dtype of its weights, reports of the conversions)."""
    dtype = PRECISION_STR_TO_DTYPE[settings.resolved_dtype()]
    with set_default_dtype(dtype), torch.device("meta"):
        model = config.instantiate(settings.model)
        conversions = [config.instantiate(node) for node in settings.model_converters]
        reports = apply_conversions(model, conversions)
    return model, dtype, reports


def nodes_of(dataset: Any) -> Sequence[Any]:
    """Return the dataset nodes of a setting: itself, its items if it is a list, or the datasets of a mixture."""
    if is_mixture(dataset) and isinstance(dataset.get("datasets"), Mapping):
        return list(dataset["datasets"].values())
    if isinstance(dataset, Sequence) and not isinstance(dataset, str):
        return dataset
    return [dataset]


def is_mixture(dataset: Any) -> bool:
    """Return whether a setting is a ``torchtune.datasets.mixed_dataset``."""
    return isinstance(dataset, Mapping) and str(dataset.get("_component_")).endswith("datasets.mixed_dataset")


def row_length(
    settings: SettingsView, model: torch.nn.Module | None = None, measured: int | None = None
) -> tuple[int, bool]:
    """Return (tokens of the longest row, whether this number is assumed); ``measured`` is known from the data."""
    if measured is not None:
        return measured, False
    limits = [settings.max_seq_len]
    for node in nodes_of(settings.dataset):
        if node is not None:
            limits.append(node.get("max_seq_len"))
    lengths = [limit for limit in limits if limit]
    if lengths:
        return min(lengths), False
    return min(_ASSUMED_LENGTH, getattr(model, "max_seq_len", None) or _ASSUMED_LENGTH), True


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return the numbers of (all, trained) parameters; quantized weights count the elements of the full weight."""
    total = sum(math.prod(shape) for shape in full_shapes(model).values())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return total, trained


def weights_memory(settings: SettingsView) -> str:
    """Return a text with the GiB of the weights of all models of a run, as stored."""
    views = [settings]
    for _, view in settings.other_models().values():
        views.append(view)
    size = 0
    for view in views:
        model, _, _ = build_on_meta(view)
        size += sum(_num_bytes(parameter) for parameter in model.parameters())
    return f"{size / 2**30:.2f} GiB of weights"


def _num_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # quantized: count the stored tensors
        return sum(_num_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def plan_run(settings: Any, processes: int = 1, length: int | None = None) -> str:
    """Describe a run: parameters, dtype, mesh and tokens per step. Nothing is loaded and no file is opened.

    Args:
        settings: settings of a recipe; see ``SettingsView`` for the names. A recipe that does not train needs only the
            names of the model.
        processes: number of processes.
        length: tokens of the longest row of the data; by default from the settings.

    Returns:
        Text of about five lines.

    Raises:
        RecipeSettingsError: a name that the library reads is missing, or its value has the wrong type.
        ParallelDimsError: the mesh does not fit the number of processes.
    """
    settings = SettingsView.of(settings)
    dims = arrange(settings, processes)
    model, dtype, reports = build_on_meta(settings)
    total, trained = count_parameters(model)
    parameters = f"{total:,}"
    if settings.optimizer:
        parameters += f", of which {trained:,} are trained ({trained / max(total, 1):.2%})"
    lines = [f"model       {settings.model.get('_component_')}, {str(dtype).removeprefix('torch.')}"]
    for name, (_, view) in settings.other_models().items():
        lines.append(f"{name:<12}{view.model.get('_component_')}")
    lines.append(f"parameters  {parameters}")
    for report in reports:
        lines.append(f"converted   {report}")
    lines.append(f"mesh        {dims}, device {settings.device or 'chosen at start'}")
    device = parse_device(settings.device)
    if not has_fast_matmul(dtype, device):
        lines.append(emulation_warning(settings.resolved_dtype(), device))
    if settings.optimizer is None:
        lines.append(f"memory      {weights_memory(settings)}")
        return "\n".join(lines)
    batch_size = settings.batch_size
    length, is_assumed = row_length(settings, model, length)
    remark = "(tokenizer.max_seq_len is not set, so this is a guess)" if is_assumed else "at most"
    lines.append(f"micro-batch {batch_size} x {length} = {batch_size * length:,} tokens {remark}")
    return "\n".join(lines)
