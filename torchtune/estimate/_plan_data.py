"""Number of rows, tokens and steps of a run."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtune import config
from torchtune.config import SettingsView
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
from torchtune.estimate._plan import arrange, context_length
from torchtune.models import is_classifier
from torchtune.supervision import StepPlan, explain_no_validation
from torchtune.training import find_task
from torchtune.utils import local_path

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
    if seen.read:  # a source of more rows than the sample is estimated from the rows that were read
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
    if num_outputs is None:
        return
    folder = local_path(str(cfg.checkpointer.get("checkpoint_dir")), "checkpointer.checkpoint_dir")
    if is_classifier(folder) or not (folder / "config.json").is_file():
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
        find_task(datasets, datasets_val, config.instantiate(cfg.loss), num_outputs=num_outputs)
