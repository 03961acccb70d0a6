"""Show a dataset as a run sees it: tokens, labels, lengths, packs, steps, and examples with their trained tokens."""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, ExampleDataset
from torchtune.datasets import PackedDataset, content_of, histogram, size_of
from torchtune.tokenizers import decode_pieces, document_texts
from torchtune.utils import UserError

_COLOR = ("\x1b[32m", "\x1b[0m")
_BRACKETS = ("[[", "]]")
_MAX_EXAMPLE = 3000  # characters


def _iter_rows(dataset: ExampleDataset, end: int = sys.maxsize) -> Iterator[list[tuple[str, np.ndarray, np.ndarray]]]:
    """Yield each row as a list of (name, tokens, labels), two for a preference pair; arrays are int ``[s]``."""
    for index in range(min(end, len(dataset))):
        texts = document_texts(dataset.token_row(index))
        if not texts:
            raise UserError(f"{type(dataset).__name__}: its rows have no 'tokens' and 'labels' to show.")
        yield texts


def _one_of_each_run(tokens: np.ndarray, image_tokens: Sequence[int]) -> np.ndarray:
    """Return which tokens to show: only the first of consecutive equal image tokens."""
    repeated = np.isin(tokens[1:], list(image_tokens)) & (tokens[1:] == tokens[:-1])
    return np.concatenate([[True], ~repeated])[: len(tokens)]


def _decode_row(tokens: np.ndarray, labels: np.ndarray, tokenizer: Any, sizes: Sequence[tuple[int, int]]) -> str:
    """Decode a row, with the trained tokens between marks, and with image sizes instead of image tokens."""
    opening, closing = _COLOR if _has_color() else _BRACKETS
    pieces = decode_pieces(tokens, labels, tokenizer)
    text = "".join(f"{opening}{text}{closing}" if trained else text for text, trained in pieces)
    for size in sizes:
        text = text.replace("<|image|>", "<image {}x{}>".format(*size), 1)
    return (
        text
        if len(text) <= _MAX_EXAMPLE
        else f"{text[:_MAX_EXAMPLE]}{closing if _has_color() else ''} … ({len(text):,} characters)"
    )


def _has_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def show_dataset(
    name: str, node: Any, tokenizer: Any, examples: int, everything: bool, sample: int, longest: int | None
) -> dict[str, Any]:
    """Print statistics and examples of a setting's datasets.

    Args:
        name: name of the setting.
        node: config node of a dataset, or a list of nodes.
        tokenizer: the model's tokenizer.
        examples: number of rows to print.
        everything: read all rows, instead of ``sample`` rows per source.
        sample: number of rows to read from every source.
        longest: tokens of the longest row that the model reads; None if unknown.

    Returns:
        ``examples``: number of rows or packs, extrapolated from the sample; ``hashes`` of the rows that were read;
        ``exact``: whether all rows were read.

    Raises:
        DataError: a row cannot be trained on, or a dataset cannot be loaded.
    """
    from torchtune.datasets import instantiate_dataset, preview

    with nullcontext() if everything else preview(sample) as seen:
        dataset = instantiate_dataset(node, tokenizer, longest)
        reasoning = list(_describe_reasoning(dataset, tokenizer))
    scale = 1.0 if seen is None or not seen.read else seen.total / seen.read
    counts = _count_rows(dataset, getattr(tokenizer, "max_seq_len", None))
    print(
        "\n".join(
            [f"\n{name}: {_format_row_count(counts, scale)}", *_describe_counts(dataset, counts, scale), *reasoning]
        )
    )
    first = dataset.row_datasets()[0]
    for number, row in enumerate(_iter_rows(first, end=examples)):
        sizes = [size_of(image) for image in first.images(number)]
        plan = getattr(getattr(tokenizer, "processor", None), "plan", None)
        for side, ids, targets in row:
            summary = f"{len(ids):,} tokens, {int((targets != CROSS_ENTROPY_IGNORE_IDX).sum()):,} trained on"
            marks = "in color" if _has_color() else "between [[ and ]]"
            print(f"\n--- row {number}{f', {side}' if side else ''}: {summary}, {marks}")
            if plan is not None and sizes:
                shown = ", ".join(f"{size[0]}x{size[1]} ({plan(size).tokens:,} tokens)" for size in sizes)
                print(f"images: {shown}")
            kept = _one_of_each_run(ids, getattr(tokenizer, "image_tokens", ()))
            print(_decode_row(ids[kept], targets[kept], tokenizer, sizes))
    return {"examples": round(len(dataset) * scale), "hashes": counts.hashes, "exact": scale == 1.0}


@dataclass
class _Counts:
    """Statistics of rows: ``full`` have at least ``limit`` tokens, ``copies`` repeat the tokens of an earlier row."""

    limit: int | None
    rows: int = 0
    labels: int = 0
    full: int = 0
    copies: int = 0
    lengths: list[int] = field(default_factory=list)
    hashes: dict[int, int] = field(default_factory=dict)


def _count_rows(dataset: Any, limit: int | None) -> _Counts:
    counts = _Counts(limit)
    for part, index, row in (
        (inner, *found) for inner in dataset.row_datasets() for found in enumerate(_iter_rows(inner))
    ):
        counts.rows += 1
        key = hash((*(ids.tobytes() for _, ids, _ in row), *map(content_of, part.images(index))))
        counts.copies += counts.hashes.setdefault(key, counts.rows) != counts.rows
        for _, ids, targets in row:
            counts.lengths.append(len(ids))
            counts.labels += int((targets != CROSS_ENTROPY_IGNORE_IDX).sum())
            counts.full += limit is not None and len(ids) >= limit
    return counts


def _format_row_count(counts: _Counts, scale: float) -> str:
    if scale == 1.0:
        return f"{counts.rows:,} rows"
    return f"about {round(counts.rows * scale):,} rows (counts are of the first {counts.rows:,}; --all reads every row)"


def _describe_counts(dataset: Any, counts: _Counts, scale: float) -> Iterator[str]:
    about, tokens = "" if scale == 1.0 else "about ", sum(counts.lengths)
    share = 100 * counts.labels / max(tokens, 1)
    trained = f"{about}{round(counts.labels * scale):,} of them trained on ({share:.1f} %)"
    yield f"tokens      {about}{round(tokens * scale):,}, {trained}"
    if images := sum(part.num_images or 0 for part in dataset.row_datasets()):
        yield f"images      {about}{round(images * scale):,}"
    if counts.limit is not None:
        yield f"truncated   {counts.full:,} rows have max_seq_len={counts.limit} tokens or were truncated to it"
    for part in dataset.row_datasets():
        if part.omitted:
            yield f"template    {part.omitted}"
    if dropped := sum(len(part.dropped) for part in dataset.row_datasets()):
        yield f"dropped     {dropped:,} rows cannot be trained on and are left out"
    if isinstance(dataset, PackedDataset):
        fill = f"{100 * dataset.fill:.1f} % full"
        yield f"packs       {about}{round(len(dataset) * scale):,} of up to {dataset.max_seq_len:,} tokens, {fill}"
    many = f"{counts.copies:,} rows have the tokens of an earlier row"
    yield f"duplicates  {many if counts.copies else 'none among the rows that were read'}"
    yield histogram(counts.lengths, "tokens per row")


def _describe_reasoning(dataset: Any, tokenizer: Any) -> Iterator[str]:
    """Yield lines on how many rows other policies for earlier reasoning would change."""
    if not hasattr(tokenizer, "changing_policies"):
        return
    changed = []
    for part in dataset.row_datasets():
        for messages in part.conversations() or ():
            changed.append(tokenizer.changing_policies(messages))
    rows = Counter(policy for policies in changed for policy in policies)
    if rows:
        others = ", ".join(f"{policy} changes {count:,} rows" for policy, count in rows.items())
        yield f"reasoning   {tokenizer.reasoning} is set for turns before the last question; of those read, {others}"


def show_config(cfg: Any, examples: int, everything: bool, sample: int) -> None:
    """Print statistics of a recipe's training and validation data.

    Raises:
        DataError: a row cannot be trained on, or a dataset cannot be loaded.
        RecipeSettingsError: a setting that the library reads is missing or has another type.
    """
    from torchtune import config
    from torchtune.estimate import is_mixture, measure, steps_of_epoch
    from torchtune.supervision import count_steps, describe_global_batch
    from torchtune.training import context_length

    tokenizer, longest = config.instantiate(cfg.tokenizer), context_length(cfg)
    train = show_dataset("dataset", cfg.dataset, tokenizer, examples, everything, sample, longest)
    if cfg.dataset_val is not None:
        held_out = show_dataset("dataset_val", cfg.dataset_val, tokenizer, 0, everything, sample, longest)
        both = train["hashes"].keys() & held_out["hashes"].keys()
        of = "" if train["exact"] and held_out["exact"] else " among the rows that were read (--all compares every row)"
        rows = f"{len(both):,} rows of dataset_val are in dataset too: remove them from one" if both else "none"
        print(f"leaks       {rows}{of}")
    mixed, exact = is_mixture(cfg.dataset), train["exact"]
    examples = train["examples"]
    if mixed:
        examples = measure(cfg.dataset, tokenizer, sys.maxsize if exact else sample, longest).examples
    per_epoch = steps_of_epoch(cfg, examples, 1)
    print(f"\nbatch       {describe_global_batch(cfg, 1, examples)}")
    print(f"steps       {'' if train['exact'] else 'about '}{count_steps(cfg, per_epoch)}, on one device")
