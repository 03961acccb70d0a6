"""Facts about a run that need no simulation: model on the meta device, parameters, mesh, tokens per step."""

import dataclasses
import math
from typing import Any

import torch

from torchtune import config
from torchtune.config import RecipeSettingsError, SettingsView, as_written
from torchtune.datasets import dataset_nodes
from torchtune.modules import text_decoder
from torchtune.modules.conversion import apply_conversions, full_shapes
from torchtune.supervision import StepPlan
from torchtune.training.parallel import ParallelDims
from torchtune.training.precision import (
    PRECISION_STR_TO_DTYPE,
    best_dtype,
    emulation_warning,
    has_fast_matmul,
    set_default_dtype,
)
from torchtune.utils import is_simulated, parse_device

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
    # A recipe without a dimension of the mesh does not split along it.
    return ParallelDims(
        dp_replicate=settings.data_parallel_replicate_dim or 1,
        dp_shard=settings.data_parallel_shard_dim,
        tp=settings.tensor_parallel_dim or 1,
        cp=settings.context_parallel_dim or 1,
        ep=settings.expert_parallel_dim or 1,
        world_size=processes,
    )


def weight_dtype(settings: SettingsView) -> str:
    """Return the name of the dtype of a run's weights and activations."""
    if settings.dtype is not None:
        return settings.dtype
    if "dtype" in settings.declared:
        return best_dtype(parse_device(settings.device))
    return "fp32"  # torch's default, which a recipe without the setting uses


def other_models(settings: SettingsView) -> dict[str, tuple[Any, SettingsView]]:
    """Map the name of each further model to its checkpointer, and to a view of the settings with this model.

    The model ``value`` is trained; all others are frozen.
    """
    # The settings' converters are for ``model`` alone.
    models: dict[str, tuple[Any, SettingsView]] = {}
    if settings.teacher_model is not None:
        teacher = settings.replace(model=settings.teacher_model, model_converters=None)
        models["teacher"] = (settings.teacher_checkpointer, teacher)
    if settings.ref_model is not None:
        reference = settings.replace(model=settings.ref_model, model_converters=None)
        models["reference"] = (settings.ref_checkpointer, reference)
    if settings.reward_and_value_model is not None:  # PPO: reward and value model are of one kind
        reward_and_value = settings.replace(model=settings.reward_and_value_model, model_converters=None)
        models["value"] = (settings.value_checkpointer, reward_and_value)
        models["reward"] = (settings.reward_checkpointer, reward_and_value)
        models["reference"] = (settings.ref_policy_checkpointer, settings)  # the policy's own architecture
    return models


def context_length(settings: Any) -> int | None:
    """Return the tokens of the longest row that all models of a run read: the smallest ``max_seq_len`` of them.

    The models are built on the meta device, without weights.

    Args:
        settings: settings of a recipe.

    Returns:
        None if no model has a limit, or the run is simulated.

    Example:
        >>> node = {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}
        >>> torchtune.estimate.context_length({"model": node})
        131072
    """
    if is_simulated():
        return None
    cfg = SettingsView.of(settings)
    nodes = [cfg.model]
    if cfg.model is None:  # in a mapping, PPO's model is policy_model; its dataclass has both names
        nodes = [cfg.policy_model]
    for _, view in other_models(cfg).values():
        nodes.append(view.model)
    lengths = []
    with torch.device("meta"):
        for node in nodes:
            if node is not None:
                model = text_decoder(config.instantiate(node))
                lengths.append(getattr(model, "max_seq_len", None))
    return min((length for length in lengths if isinstance(length, int)), default=None)


def build_on_meta(settings: Any) -> tuple[torch.nn.Module, torch.dtype, list[Any]]:
    """Build the converted model of a run on the meta device, which allocates no memory.

    Args:
        settings: settings of a recipe.

    Returns:
        (model, dtype of its weights, reports of the conversions)

    Example:
        >>> node = {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}
        >>> model, dtype, _ = torchtune.estimate.build_on_meta({"model": node, "dtype": "bf16"})
        >>> model.output.weight.device.type, dtype
        ('meta', torch.bfloat16)
    """
    settings = SettingsView.of(settings)
    dtype = PRECISION_STR_TO_DTYPE[weight_dtype(settings)]
    with set_default_dtype(dtype), torch.device("meta"):
        model = config.instantiate(settings.model)
        conversions = [config.instantiate(node) for node in settings.model_converters or ()]
        reports = apply_conversions(model, conversions)
    return model, dtype, reports


def row_length(
    settings: SettingsView, model: torch.nn.Module | None = None, measured: int | None = None
) -> tuple[int, bool]:
    """Return (tokens of the longest row, whether this number is assumed); ``measured`` is known from the data."""
    if measured is not None:
        return measured, False
    limits = [settings.max_seq_len]  # of the tokenizer, and of each dataset
    for node in dataset_nodes(settings.dataset):
        if node is not None:
            limits.append(node.get("max_seq_len"))
    lengths = [limit for limit in limits if limit]
    if lengths:
        return min(lengths), False
    longest = getattr(model, "max_seq_len", None) or _ASSUMED_LENGTH
    return min(_ASSUMED_LENGTH, longest), True


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return the numbers of (all, trained) parameters; quantized weights count the elements of the full weight.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1).requires_grad_(False))
        >>> torchtune.estimate.count_parameters(model)
        (13, 9)
    """
    total = sum(math.prod(shape) for shape in full_shapes(model).values())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return total, trained


def weights_memory(settings: Any) -> str:
    """Describe the memory of the weights of all models of a run, as stored.

    Example:
        >>> node = {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}
        >>> torchtune.estimate.weights_memory({"model": node, "dtype": "bf16"})
        '2.30 GiB of weights'
    """
    settings = SettingsView.of(settings)
    views = [settings]
    for _, view in other_models(settings).values():
        views.append(view)
    size = 0
    for view in views:
        model, _, _ = build_on_meta(view)
        size += sum(_num_bytes(parameter) for parameter in model.parameters())
    return f"{size / 2**30:.2f} GiB of weights"


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; of a quantized one, of the tensors in which it is stored."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_num_bytes(getattr(tensor, name)) for name in names)
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
    lines = [f"model       {as_written(settings.model['_component_'])}, {str(dtype).removeprefix('torch.')}"]
    for name, (_, view) in other_models(settings).items():
        lines.append(f"{name:<12}{as_written(view.model['_component_'])}")
    lines.append(f"parameters  {parameters}")
    for report in reports:
        lines.append(f"converted   {report}")
    lines.append(f"mesh        {dims}, device {settings.device or 'chosen at start'}")
    device = parse_device(settings.device)
    if not has_fast_matmul(dtype, device):
        lines.append(emulation_warning(weight_dtype(settings), device))
    if settings.optimizer is None:
        lines.append(f"memory      {weights_memory(settings)}")
        return "\n".join(lines)
    batch_size = StepPlan.of(settings).batch_size
    length, is_assumed = row_length(settings, model, length)
    remark = "(tokenizer.max_seq_len is not set, so this is a guess)" if is_assumed else "at most"
    lines.append(f"micro-batch {batch_size} x {length} = {batch_size * length:,} tokens {remark}")
    return "\n".join(lines)
