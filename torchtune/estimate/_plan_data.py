"""Number of rows, tokens and steps of a run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune import config
from torchtune.data import BatchLoader, DataError
from torchtune.datasets import NotRead, instantiate_dataset, mixture_counts, mixture_weights, preview
from torchtune.estimate._plan import arrange, is_mixture, nodes_of
from torchtune.supervision import count_steps, count_tokens, describe_global_batch, explain_no_validation
from torchtune.training import SettingsView

# Maximum rows per source that are tokenized for an estimate; takes about a second.
SAMPLE = 2000


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
    cfg = SettingsView.of(settings)
    tokenizer = config.instantiate(cfg.tokenizer)
    if cfg.dataset_val is not None:
        _, shown = measure(cfg.dataset_val, tokenizer, sample)
        held_out = [("validation", shown)]
    else:
        held_out = []
    examples, shown = measure(cfg.dataset, tokenizer, sample)
    dims = arrange(cfg, processes)
    streams = any(node.get("streaming") for node in nodes_of(cfg.dataset))
    per_step = describe_global_batch(cfg, dims.data_size, None if streams else examples)
    lines = [("data", shown), *held_out, ("batch", per_step)]
    if streams:
        if cfg.max_steps_per_epoch is None:
            raise DataError("dataset: streaming=True has no end: set max_steps_per_epoch.")
        per_epoch = cfg.max_steps_per_epoch
    elif examples is None:
        return [*lines, ("steps", "unknown until the data are read")]
    else:
        per_epoch = steps_of_epoch(cfg, examples, dims.data_size)
    if (unused := explain_no_validation(cfg, cfg.epochs * per_epoch)) is not None:
        lines = [(name, f"{text}; {unused}" if name == "validation" else text) for name, text in lines]
    _try_schedule(cfg, cfg.epochs * per_epoch)
    return [*lines, ("steps", f"{'about ' if shown.startswith('about') else ''}{count_steps(cfg, per_epoch)}")]


def measure(dataset: Any, tokenizer: Any, sample: int) -> tuple[int | None, str]:
    """Return (examples, text) of a dataset setting; examples are None if the rows are unknown."""
    counts: list[float | None] = []
    exact, packed, unknown = True, False, []
    sizes: list[int] = []
    for node in nodes_of(dataset):
        try:
            with preview(sample) as seen:
                built = instantiate_dataset(node, tokenizer)
        except NotRead as reason:
            unknown.append(str(reason))
            continue
        scale = seen.total / seen.read if seen.read else 1.0
        sizes.append(math.ceil(len(built) * scale))
        found = count_tokens(built)
        counts.append(None if found is None else found * scale)
        exact, packed = exact and scale == 1.0, packed or hasattr(built, "packs")
    if unknown:
        return None, "; ".join(unknown)
    kind = "packs" if packed else "rows"
    examples = sum(sizes)
    tokens = "" if None in counts else f", {round(sum(counts)):,} tokens"
    if is_mixture(dataset):
        per_epoch = mixture_examples(dataset, sizes)
        if exact:
            return per_epoch, f"{examples:,} {kind}{tokens}, mixed: {per_epoch:,} {kind} per epoch"
        examples, kind = per_epoch, f"{kind} per epoch of a mixture"
    if exact:
        return examples, f"{examples:,} {kind}{tokens}, all tokenized to count them"
    return (
        examples,
        f"about {examples:,} {kind}{tokens}, estimated from the first {sample:,} rows of each source",
    )


def mixture_examples(node: Mapping[str, Any], sizes: Sequence[int]) -> int:
    """Return the examples per epoch of a mixture of datasets with ``sizes``. Raises :class:`DataError`."""
    names = tuple(map(str, node["datasets"]))
    weights = mixture_weights(names, sizes, node.get("weights"), node.get("temperature", 1.0))
    return sum(mixture_counts(sizes, weights, node.get("stop", "repeat")))


def steps_of_epoch(cfg: SettingsView, examples: int, data_size: int) -> int:
    loader = BatchLoader(
        range(examples),
        batch_size=cfg.batch_size,
        collate_fn=list,
        shuffle=False,
        seed=0,
        accumulation_steps=cfg.gradient_accumulation_steps,
        max_steps_per_epoch=cfg.max_steps_per_epoch,
        world_size=data_size,
    )
    return len(loader)


def _try_schedule(cfg: SettingsView, steps: int) -> None:
    """Build the schedule, so that it can warn about the number of steps."""
    probe = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    config.instantiate(cfg.lr_scheduler, probe, num_training_steps=steps, last_epoch=-1)
