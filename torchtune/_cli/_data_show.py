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
from torchtune.datasets import ClassificationDataset, PackedDataset, content_of, describe_labels, histogram, size_of
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


def _decode_row(tokens: np.ndarray, labels: np.ndarray, tokenizer: Any, sizes: Sequence[tuple[int, int]]) -> str:
    """Decode a row, with the trained tokens between marks, and with image sizes instead of image tokens."""
    has_color = _has_color()
    opening, closing = _COLOR if has_color else _BRACKETS
    text = ""
    for piece, trained in decode_pieces(tokens, labels, tokenizer):
        if trained:
            piece = f"{opening}{piece}{closing}"
        text += piece
    for width, height in sizes:  # each replaces the first token that is left
        text = text.replace("<|image|>", f"<image {width}x{height}>", 1)
    if len(text) <= _MAX_EXAMPLE:
        return text
    cut = text[:_MAX_EXAMPLE]
    if has_color:  # the cut may be within a colored piece
        cut += closing
    return f"{cut} … ({len(text):,} characters)"


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

    reading = nullcontext() if everything else preview(sample)
    with reading as seen:
        dataset = instantiate_dataset(node, tokenizer, longest)
        # A list, so that conversations are read within the preview, from the rows of the dataset alone.
        reasoning = list(_describe_reasoning(dataset, tokenizer))
    scale = 1.0
    if seen is not None and seen.read:  # counts of a sample are multiplied, as an estimate of those of all rows
        scale = seen.total / seen.read
    counts = _count_rows(dataset, getattr(tokenizer, "max_seq_len", None))
    if scale == 1.0:
        num_rows = f"{counts.rows:,} rows"
    else:
        about = f"about {round(counts.rows * scale):,} rows"
        num_rows = f"{about} (counts are of the first {counts.rows:,}; --all reads every row)"
    print(f"\n{name}: {num_rows}")
    for line in [*_describe_counts(dataset, counts, scale), *reasoning]:
        print(line)
    _print_examples(dataset.row_datasets()[0], tokenizer, examples)
    return {"examples": round(len(dataset) * scale), "hashes": counts.hashes, "exact": scale == 1.0}


def _print_examples(dataset: Any, tokenizer: Any, count: int) -> None:
    """Print the first rows of a dataset, with their trained tokens between marks."""
    # Only tokenizers of models that read images have a processor, which plans the tokens of an image of some size.
    plan = getattr(getattr(tokenizer, "processor", None), "plan", None)
    image_tokens = list(getattr(tokenizer, "image_tokens", ()))
    marks = "in color" if _has_color() else "between [[ and ]]"
    for number, row in enumerate(_iter_rows(dataset, end=count)):
        sizes = [size_of(image) for image in dataset.images(number)]
        weights = _weights_of(dataset, number)
        weight = ""
        if weights is not None and min(weights) == max(weights):
            weight = f", weight {weights[0]:g}"
        elif weights is not None:
            weight = f", weights {min(weights):g} to {max(weights):g}"
        for side, tokens, labels in row:  # arrays [s]
            title = f"row {number}"
            if side:
                title += f", {side}"
            num_trained = int((labels != CROSS_ENTROPY_IGNORE_IDX).sum())
            trained = f"{num_trained:,} trained on, {marks}"
            if isinstance(dataset, ClassificationDataset):  # the label is a class and not a token
                trained = f"label {dataset.values[number]!r}"
                labels = np.full_like(labels, CROSS_ENTROPY_IGNORE_IDX)
            print(f"\n--- {title}: {len(tokens):,} tokens, {trained}{weight}")
            if plan is not None and sizes:
                images = [f"{size[0]}x{size[1]} ({plan(size).tokens:,} tokens)" for size in sizes]
                print(f"images: {', '.join(images)}")
            # Of the tokens of an image, only the first is shown, in whose place its size is written.
            is_shown = np.ones(len(tokens), dtype=bool)
            is_shown[1:] = ~(np.isin(tokens[1:], image_tokens) & (tokens[1:] == tokens[:-1]))
            print(_decode_row(tokens[is_shown], labels[is_shown], tokenizer, sizes))


@dataclass
class _Counts:
    """Statistics of rows.

    ``full`` rows have at least ``limit`` tokens, ``copies`` repeat the tokens of an earlier row, and ``weighted`` rows
    have other weights than 1, of which ``weights`` are the smallest and the largest.
    """

    limit: int | None
    rows: int = 0
    labels: int = 0
    full: int = 0
    copies: int = 0
    weighted: int = 0
    weights: tuple[float, float] = (1.0, 1.0)
    lengths: list[int] = field(default_factory=list)
    hashes: dict[int, int] = field(default_factory=dict)


def _weights_of(dataset: Any, index: int) -> list[float] | None:
    """Return the weights of a row's labels, or the one of a pair; None if they are all 1."""
    row = dataset.token_row(index)
    if "weight" in row:
        return [row["weight"]]
    if "label_weights" not in row:
        return None
    is_label = np.asarray(row["labels"]) != CROSS_ENTROPY_IGNORE_IDX
    return np.asarray(row["label_weights"])[is_label].tolist()


def _count_rows(dataset: Any, limit: int | None) -> _Counts:
    """Count the rows of a dataset that have been read; ``limit`` is the maximum number of tokens of a row."""
    counts = _Counts(limit)
    for part in dataset.row_datasets():
        for index, row in enumerate(_iter_rows(part)):
            counts.rows += 1
            # Hashes, because the tokens of all rows would take too much memory.
            texts = [tokens.tobytes() for _, tokens, _ in row]
            images = [content_of(image) for image in part.images(index)]
            key = hash((*texts, *images))
            if key in counts.hashes:
                counts.copies += 1
            else:
                counts.hashes[key] = counts.rows
            for _, tokens, labels in row:
                counts.lengths.append(len(tokens))  # two of a pair, whose texts are two sequences
                counts.labels += int((labels != CROSS_ENTROPY_IGNORE_IDX).sum())
                if limit is not None and len(tokens) >= limit:
                    counts.full += 1
            weights = _weights_of(part, index)
            if weights is not None:
                counts.weighted += 1
                smallest, largest = counts.weights
                counts.weights = (min(smallest, *weights), max(largest, *weights))
    return counts


def _describe_counts(dataset: Any, counts: _Counts, scale: float) -> Iterator[str]:
    """Yield a line for each statistic.

    The totals of tokens, images and packs are multiplied by ``scale``; numbers of rows are those among the rows read.
    """
    about = "" if scale == 1.0 else "about "
    num_tokens = sum(counts.lengths)
    share = 100 * counts.labels / max(num_tokens, 1)
    trained = f"{about}{round(counts.labels * scale):,} of them trained on ({share:.1f} %)"
    yield f"tokens      {about}{round(num_tokens * scale):,}, {trained}"
    if counts.weighted:
        smallest, largest = counts.weights
        yield f"weights     {counts.weighted:,} rows have other weights than 1 ({smallest:g} to {largest:g})"
    num_images = sum(part.num_images or 0 for part in dataset.row_datasets())
    if num_images:
        yield f"images      {about}{round(num_images * scale):,}"
    if counts.limit is not None:
        yield f"truncated   {counts.full:,} rows have max_seq_len={counts.limit} tokens or were truncated to it"
    for part in dataset.row_datasets():
        if isinstance(part, ClassificationDataset):
            yield f"labels      {describe_labels(part.task, part.values)}"
        if part.omitted:
            yield f"template    {part.omitted}"
    num_dropped = sum(len(part.dropped) for part in dataset.row_datasets())
    if num_dropped:
        yield f"dropped     {num_dropped:,} rows cannot be trained on and are left out"
    if isinstance(dataset, PackedDataset):
        fill = f"{100 * dataset.fill:.1f} % full"
        yield f"packs       {about}{round(len(dataset) * scale):,} of up to {dataset.max_seq_len:,} tokens, {fill}"
    if counts.copies:
        yield f"duplicates  {counts.copies:,} rows have the tokens of an earlier row"
    else:
        yield "duplicates  none among the rows that were read"
    yield histogram(counts.lengths, "tokens per row")


def _describe_reasoning(dataset: Any, tokenizer: Any) -> Iterator[str]:
    """Yield lines on how many rows other policies for earlier reasoning would change."""
    if not hasattr(tokenizer, "changing_policies"):
        return
    num_changed: Counter[str] = Counter()  # rows by policy
    for part in dataset.row_datasets():
        for messages in part.conversations() or ():
            num_changed.update(tokenizer.changing_policies(messages))
    if num_changed:
        changes = ", ".join(f"{policy} changes {count:,} rows" for policy, count in num_changed.items())
        yield f"reasoning   {tokenizer.reasoning} is set for turns before the last question; of those read, {changes}"


def show_config(cfg: Any, examples: int, everything: bool, sample: int) -> None:
    """Print statistics of a recipe's training and validation data.

    Raises:
        DataError: a row cannot be trained on, or a dataset cannot be loaded.
        RecipeSettingsError: a setting that the library reads is missing or has another type.
    """
    from torchtune import config
    from torchtune.datasets import is_mixture
    from torchtune.estimate import context_length, measure
    from torchtune.supervision import StepPlan

    tokenizer = config.instantiate(cfg.tokenizer)
    longest = context_length(cfg)
    train = show_dataset("dataset", cfg.dataset, tokenizer, examples, everything, sample, longest)
    if cfg.dataset_val is not None:
        # Without examples: those of the training data show the layout of both.
        held_out = show_dataset("dataset_val", cfg.dataset_val, tokenizer, 0, everything, sample, longest)
        num_leaks = len(train["hashes"].keys() & held_out["hashes"].keys())
        leaks = "none"
        if num_leaks:
            leaks = f"{num_leaks:,} rows of dataset_val are in dataset too: remove them from one"
        if not (train["exact"] and held_out["exact"]):
            leaks += " among the rows that were read (--all compares every row)"
        print(f"leaks       {leaks}")
    num_examples = train["examples"]
    if is_mixture(cfg.dataset):  # an epoch of a mixture has as many rows as its weights say
        num_read = sample
        if train["exact"]:  # all rows were read
            num_read = sys.maxsize
        num_examples = measure(cfg.dataset, tokenizer, num_read, longest).examples
    plan = StepPlan.of(cfg)
    steps = plan.describe_steps(plan.steps_per_epoch(num_examples, data_size=1))
    about = "" if train["exact"] else "about "
    print(f"\nbatch       {plan.describe_batch(1, num_examples)}")
    print(f"steps       {about}{steps}, on one device")
