"""What a run will be, without a simulation: its models on the meta device, parameters and mesh; its rows and steps."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtune import config
from torchtune.config import RecipeSettingsError, SettingsView, as_written
from torchtune.data import DataError
from torchtune.datasets import (
    NotRead,
    dataset_nodes,
    explain_shared_rows,
    instantiate_dataset,
    is_mixture,
    mixture_examples,
    preview,
)
from torchtune.models import is_classifier
from torchtune.modules import text_decoder
from torchtune.modules.conversion import apply_conversions, full_shapes
from torchtune.supervision import StepPlan, explain_no_validation
from torchtune.training import find_task
from torchtune.training.parallel import ParallelDims
from torchtune.training.precision import (
    PRECISION_STR_TO_DTYPE,
    best_dtype,
    emulation_warning,
    has_fast_matmul,
    set_default_dtype,
)
from torchtune.utils import is_simulated, local_path, parse_device

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
    if settings.optimizer is None:  # a recipe that does not train: its memory is that of the weights
        lines.append(f"memory      {weights_memory(settings)}")
        return "\n".join(lines)
    batch_size = StepPlan.of(settings).batch_size
    length, is_assumed = row_length(settings, model, length)
    remark = "(tokenizer.max_seq_len is not set, so this is a guess)" if is_assumed else "at most"
    lines.append(f"micro-batch {batch_size} x {length} = {batch_size * length:,} tokens {remark}")
    return "\n".join(lines)


# Maximum rows per source that are tokenized for an estimate; takes about a second.
SAMPLE = 2000


@dataclass
class Measured:
    """Size of a dataset setting.

    Attributes:
        examples: number of rows or packs; None if the rows are unknown.
        text: description.
        longest: tokens of the longest row (of one answer for preference data) or pack; None if unknown.
        exact: whether all rows were read.
    """

    examples: int | None
    text: str
    longest: int | None = None
    exact: bool = True


@dataclass
class DataPlan:
    """Lines (name, text) that :func:`plan_data` returns, and the measured training data."""

    lines: list[tuple[str, str]]
    train: Measured


def plan_data(settings: Any, processes: int = 1, sample: int = SAMPLE) -> list[tuple[str, str]]:
    """Count rows, tokens and steps; sources of more than ``sample`` rows are estimated from their first rows.

    Args:
        settings: settings of a training recipe.
        processes: number of processes.
        sample: maximum rows to tokenize per source.

    Returns:
        (name, text) of lines to show.

    Raises:
        DataError: a dataset cannot be read, or a row cannot be trained on.
        RecipeSettingsError: a name that the library reads is missing, or its value has the wrong type.
    """
    return measure_data(settings, processes, sample).lines


def measure_data(settings: Any, processes: int = 1, sample: int = SAMPLE) -> DataPlan:
    """Return what :func:`plan_data` describes; the arguments and errors are the same."""
    cfg = SettingsView.of(settings)
    tokenizer = config.instantiate(cfg.tokenizer)
    longest = context_length(cfg)

    validation = None
    if cfg.dataset_val is not None:
        validation = measure(cfg.dataset_val, tokenizer, sample, longest).text
        shared = _shared_rows(cfg, tokenizer, sample, longest)
        if shared is not None:
            validation += f"; {shared}"
    train = measure(cfg.dataset, tokenizer, sample, longest)
    nodes = dataset_nodes(cfg.dataset)
    if any(str(node.get("_component_")).endswith("datasets.classification_dataset") for node in nodes):
        _check_labels(cfg, tokenizer, sample, longest)

    dims = arrange(cfg, processes)
    streams = any(node.get("streaming") for node in nodes)
    plan = StepPlan.of(cfg)
    per_epoch = None
    if streams:
        if plan.max_steps_per_epoch is None:
            raise DataError("dataset: streaming=True has no end: set max_steps_per_epoch.")
        batch = plan.describe_batch(dims.data_size)
        per_epoch = plan.max_steps_per_epoch
    else:
        batch = plan.describe_batch(dims.data_size, train.examples)
        if train.examples is not None:
            per_epoch = plan.steps_per_epoch(train.examples, dims.data_size)

    if per_epoch is None:
        steps = "unknown until the data are read"
    else:
        if validation is not None:
            unused = explain_no_validation(cfg, plan.count_steps(per_epoch))
            if unused is not None:
                validation += f"; {unused}"
        # The schedule is built, so that it can warn about the number of steps.
        full_rate = cfg.optimizer.get("lr", 0.1)  # any, where the optimizer has a default
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=full_rate)
        num_steps = plan.count_steps(per_epoch)
        config.instantiate(cfg.lr_scheduler, optimizer, num_training_steps=num_steps, last_epoch=-1)
        steps = plan.describe_steps(per_epoch)
        if train.text.startswith("about"):  # the rows are estimated, and so are the steps
            steps = f"about {steps}"

    lines = [("data", train.text)]
    if validation is not None:
        lines.append(("validation", validation))
    lines.append(("batch", batch))
    lines.append(("steps", steps))
    return DataPlan(lines, train)


def measure(dataset: Any, tokenizer: Any, sample: int, longest: int | None) -> Measured:
    """Count the examples and tokens of a dataset setting.

    Args:
        dataset: node of a dataset, or a list of nodes.
        tokenizer: the model's tokenizer.
        sample: maximum rows to read per source.
        longest: tokens of the longest row that the model reads; None for no limit.

    Raises:
        DataError: a dataset cannot be read, or a row cannot be trained on.
    """
    sources: list[_Source] = []
    unread: list[str] = []
    for node in dataset_nodes(dataset):
        try:
            sources.append(_measure_source(node, tokenizer, sample, longest))
        except NotRead as reason:
            unread.append(str(reason))
    if unread:
        return Measured(None, "; ".join(unread), exact=False)

    sizes = [source.size for source in sources]
    examples = sum(sizes)
    is_exact = all(source.is_exact for source in sources)
    kind = "packs" if any(source.is_packed for source in sources) else "rows"
    tokens_text = ""
    tokens = [source.tokens for source in sources]
    if None not in tokens:
        tokens_text = f", {round(sum(tokens)):,} tokens"
    longest_row = None
    lengths = [source.longest for source in sources]
    if None not in lengths:
        longest_row = max(lengths)
    left_out = _describe_left_out(sources, tokenizer)
    if is_mixture(dataset):  # its weights decide how many rows of each source an epoch has
        per_epoch = mixture_examples(dataset, sizes)
        if is_exact:
            text = f"{examples:,} {kind}{tokens_text}, mixed: {per_epoch:,} {kind} per epoch{left_out}"
            return Measured(per_epoch, text, longest_row)
        examples = per_epoch
        kind = f"{kind} per epoch of a mixture"
    if is_exact:
        text = f"{examples:,} {kind}{tokens_text}, all tokenized to count them{left_out}"
        return Measured(examples, text, longest_row)
    text = (
        f"about {examples:,} {kind}{tokens_text}, estimated from the first {sample:,} rows of each source{left_out}; "
        "the run checks all rows before its first step"
    )
    return Measured(examples, text, longest_row, exact=False)


@dataclass
class _Source:
    """A dataset of a setting, as its first rows are; sizes are extrapolated to all rows.

    Attributes:
        size: number of rows or packs.
        tokens: number of tokens; None if rows are tokenized during training.
        longest: tokens of the longest row or pack; None if unknown.
        is_exact: whether all rows were read.
        is_packed: whether it has packs.
        dropped: rows that were read and cannot be trained on.
        truncated: rows that were read and are as long as the tokenizer allows.
        omitted: texts that the chat template leaves out, in words.
    """

    size: int
    tokens: float | None
    longest: int | None
    is_exact: bool
    is_packed: bool
    dropped: int = 0
    truncated: int = 0
    omitted: list[str] = field(default_factory=list)


def _measure_source(node: Any, tokenizer: Any, sample: int, longest: int | None) -> _Source:
    """Read the first rows of a dataset; for the arguments, see :func:`measure`."""
    with preview(sample) as seen:
        dataset = instantiate_dataset(node, tokenizer, longest)
    scale = 1.0
    # A source of more rows than the sample is estimated from the rows that were read. A dataset of the user's own may
    # not count them: it has read all its rows.
    if seen.read:
        scale = seen.total / seen.read
    tokens = dataset.num_known_tokens
    if tokens is not None:
        tokens *= scale
    size = math.ceil(len(dataset) * scale)
    source = _Source(size, tokens, dataset.longest, is_exact=scale == 1.0, is_packed=dataset.is_packed)
    for rows in dataset.row_datasets():
        source.dropped += len(rows.dropped)
        source.truncated += rows.num_truncated
        if rows.omitted:
            source.omitted.append(rows.omitted)
    return source


def _describe_left_out(sources: list[_Source], tokenizer: Any) -> str:
    """Return clauses about rows that are not trained on as they are; empty if there are none."""
    dropped = sum(source.dropped for source in sources)
    truncated = sum(source.truncated for source in sources)
    text = ""
    if dropped:
        text += f"; {dropped:,} rows cannot be trained on and are left out"
    if truncated:
        text += f"; {truncated:,} rows have max_seq_len={tokenizer.max_seq_len} tokens or are truncated to it"
    for source in sources:
        for reason in source.omitted:
            text += f"; {reason}"
    return text


def _shared_rows(cfg: SettingsView, tokenizer: Any, sample: int, longest: int | None) -> str | None:
    """Return a sentence if rows of the validation data are among the first rows of the training data."""
    try:
        with preview(sample):
            held_out = instantiate_dataset(cfg.dataset_val, tokenizer, longest)
            training = instantiate_dataset(cfg.dataset, tokenizer, longest)
    except NotRead:
        return None
    return explain_shared_rows(held_out, training)


def _check_labels(cfg: SettingsView, tokenizer: Any, sample: int, longest: int | None) -> None:
    """Raise the errors of a run about a classifier's labels; they are checked only if all rows were read.

    The classes of a checkpoint that is a classifier already, or may be one, are not known here: they are left to the
    run.
    """
    num_outputs = cfg.model.get("num_classes")
    if num_outputs is None:  # the builder reads classes from the checkpoint, if it has any
        return
    folder = local_path(str(cfg.checkpointer.get("checkpoint_dir")), "checkpointer.checkpoint_dir")
    if is_classifier(folder) or not (folder / "config.json").is_file():  # without the file, it may be a classifier
        return
    datasets_val = []
    try:
        with preview(sample) as seen:
            datasets = instantiate_dataset(cfg.dataset, tokenizer, longest).row_datasets()
            if cfg.dataset_val is not None:
                datasets_val = instantiate_dataset(cfg.dataset_val, tokenizer, longest).row_datasets()
    except NotRead:
        return
    if seen.read == seen.total:
        # Called for its errors; the run calls it again.
        find_task(datasets, datasets_val, config.instantiate(cfg.loss), num_outputs=num_outputs)
