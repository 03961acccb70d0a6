"""Datasets, mixtures and collate functions of configs; datasets from outside this library are checked."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch

from torchtune import config
from torchtune.config import Component, RuntimeArgs, locate
from torchtune.data import (
    CROSS_ENTROPY_IGNORE_IDX,
    Batch,
    DataError,
    ExampleDataset,
    WrappedDataset,
    as_example_dataset,
    check_shifted,
    collate_documents,
    padded_collate_sft,
    padded_collate_tiled_images_and_mask,
)
from torchtune.datasets._mixed import ConcatDataset, MixedDataset, MixedStream, Stop, mixture_counts, mixture_weights
from torchtune.datasets._tokenized import check_label_weights, check_row
from torchtune.tokenizers import check_tokenizer
from torchtune.utils import doing

# Maximum number of examples that are searched for a label: some rows may have none within max_seq_len.
_NUM_SEARCHED = 32


@doing("preparing data")
def instantiate_dataset(dataset: Any, tokenizer: Any, longest: int | None = None) -> ExampleDataset:
    """Instantiate the dataset of a config node; a list of nodes is concatenated.

    Args:
        dataset: node with ``_component_``, or a list of them.
        tokenizer: passed to every dataset.
        longest: tokens of the longest row that the model reads (:func:`torchtune.estimate.context_length`); None for no
            limit. Longer rows are refused, or skipped with ``on_bad_row=skip``.

    Raises:
        DataError: see the datasets; a row is longer than ``longest``; the tokenizer has no ``vocab_size``; or a dataset
            from outside this library is empty, or its examples lack ``tokens`` and ``labels``.

    Example:
        >>> rows = [{"input": "Who?", "output": "one cat"}]
        >>> node = {"_component_": "torchtune.datasets.instruct_dataset", "source": rows}
        >>> len(torchtune.datasets.instantiate_dataset(node, tokenizer))
        1
    """
    if tokenizer is not None:
        check_tokenizer(tokenizer, "vocab_size", reader="a recipe")
    if isinstance(dataset, Sequence) and not isinstance(dataset, Mapping | str):
        parts = [_instantiate_node(node, tokenizer) for node in dataset]
        if len(parts) == 1:
            instantiated = parts[0]
        else:  # also refuses an empty list
            instantiated = ConcatDataset(parts)
    else:
        instantiated = _instantiate_node(dataset, tokenizer)
    if longest is not None:
        instantiated.limit_rows(longest)
    return instantiated


def _instantiate_node(node: Any, tokenizer: Any) -> ExampleDataset:
    """Instantiate one dataset; one from outside this library is checked when it is read."""
    dataset = config.instantiate(node, tokenizer)
    if isinstance(dataset, ExampleDataset):
        return dataset
    return CheckedDataset(dataset, getattr(tokenizer, "vocab_size", None))


class CheckedDataset(WrappedDataset):
    """Wrapper of a dataset from outside this library that checks examples when they are read.

    Args:
        dataset: map-style dataset of examples (mappings with ``tokens`` and pre-shifted ``labels``) or packs (lists of
            examples).
        vocab_size: upper bound of token ids (exclusive); ``None`` if unknown.

    Raises:
        DataError: the dataset is empty or not map-style, an example has another format, or the first examples have no
            labels or unshifted labels.
    """

    def __init__(self, dataset: Any, vocab_size: int | None) -> None:
        super().__init__(dataset)
        self.name = type(dataset).__name__
        self._vocab_size = vocab_size
        self._longest: int | None = None
        missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
        if missing:
            raise DataError(
                f"dataset: {self.name} has no {' and no '.join(missing)}: a dataset gives examples by index and has a "
                "length, so that a run can be resumed."
            )
        self._length = len(dataset)
        if self._length == 0:
            raise DataError(f"dataset: {self.name} is empty: there is nothing to train on.")
        self._check_labels()

    def limit_rows(self, longest: int) -> None:
        """See :meth:`torchtune.data.ExampleDataset.limit_rows`; later examples are checked when they are read."""
        self._longest = longest
        self[0]

    def __getitem__(self, index: int) -> Any:
        """Return an example; raise :class:`DataError` if it has another format."""
        try:
            example = self.dataset[index]
        except IndexError as error:
            if index >= self._length or len(self.dataset) == self._length:
                raise
            raise DataError(
                f"dataset: example {index} of {self.name} is gone: it had {self._length:,} examples at the start and "
                f"has {len(self.dataset):,} now. Resume with all of them."
            ) from error
        try:
            for document in _documents_of(example):
                self._check(document)
        except DataError as error:
            raise DataError(f"dataset: example {index} of {self.name}: {error}.") from error
        return example

    def _check_labels(self) -> None:
        """Raise if the first examples have no labels, or every label is the token at its own position.

        The search ends at the first label that is another token than that at its position, mostly in the first example.
        """
        tokens: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        num_searched = min(self._length, _NUM_SEARCHED)
        for index in range(num_searched):
            for document in _documents_of(self[index]):
                tokens.append(torch.as_tensor(document["tokens"], dtype=torch.int64))
                labels.append(torch.as_tensor(document["labels"], dtype=torch.int64))
                is_labeled = labels[-1] != CROSS_ENTROPY_IGNORE_IDX
                is_other_token = labels[-1] != tokens[-1]
                # Prompts of the rollout recipes have a number and placeholder labels.
                if "number" in document or (is_labeled & is_other_token).any():
                    return
        if (torch.cat(labels) == CROSS_ENTROPY_IGNORE_IDX).all():
            raise DataError(
                f"dataset: {self.name} has no label in its first {num_searched:,} examples: labels[i] is the token to "
                f"predict at position i, and {CROSS_ENTROPY_IGNORE_IDX} where none is."
            )
        lengths = [len(row) for row in tokens]
        check_shifted(torch.cat(tokens), torch.cat(labels), lengths, self.name)

    def _check(self, document: Any) -> None:
        """Raise :class:`DataError` with the reason if a document cannot be trained on."""
        if not isinstance(document, Mapping):
            raise DataError(f"it is {type(document).__name__}, not a mapping with 'tokens' and 'labels'")
        for key in ("tokens", "labels"):
            if key not in document:
                raise DataError(f"it has no '{key}' among {', '.join(map(repr, document)) or 'nothing'}")
        tokens, labels = check_row(document["tokens"], document["labels"])
        check_label_weights(document.get("label_weights"), labels)
        if len(tokens) == 0:
            raise DataError("it has no tokens")
        if self._longest is not None and len(tokens) > self._longest:
            raise DataError(f"it has {len(tokens):,} tokens and the model reads {self._longest:,} (its max_seq_len)")
        for name, ids in (("token id", tokens), ("label", labels[labels != CROSS_ENTROPY_IGNORE_IDX])):
            if self._vocab_size is not None and len(ids) and ids.max() >= self._vocab_size:
                raise DataError(f"{name} {np.max(ids)} is not below {self._vocab_size}, the tokenizer's vocabulary")


def _documents_of(example: Any) -> list[Any]:
    """Return the documents of a pack, or an example alone; an empty list is an example, which is refused."""
    if isinstance(example, list) and example:
        return example
    return [example]


def dataset_nodes(dataset: Any) -> list[Any]:
    """Return the component nodes of a dataset setting: itself, the items of a list, or the datasets of a mixture.

    Example:
        >>> first = {"_component_": "torchtune.datasets.chat_dataset"}
        >>> second = {"_component_": "torchtune.datasets.instruct_dataset"}
        >>> mixture = {"_component_": "torchtune.datasets.mixed_dataset", "datasets": {"a": first, "b": second}}
        >>> torchtune.datasets.dataset_nodes(mixture) == torchtune.datasets.dataset_nodes([first, second])
        True
    """
    if is_mixture(dataset) and isinstance(dataset.get("datasets"), Mapping):
        return list(dataset["datasets"].values())
    if isinstance(dataset, Sequence) and not isinstance(dataset, Mapping | str):
        return list(dataset)
    return [dataset]


def is_mixture(dataset: Any) -> bool:
    """Return whether a dataset setting is a :func:`mixed_dataset`.

    Example:
        >>> torchtune.datasets.is_mixture({"_component_": "torchtune.datasets.mixed_dataset", "datasets": {}})
        True
    """
    return isinstance(dataset, Mapping) and str(dataset.get("_component_")).endswith("datasets.mixed_dataset")


def mixture_examples(node: Mapping[str, Any], sizes: Sequence[int]) -> int:
    """Return the number of examples in an epoch of a mixture.

    Args:
        node: component node of a :func:`mixed_dataset`.
        sizes: number of examples of each of its datasets.

    Raises:
        DataError: see :class:`MixedDataset`.

    Example:
        >>> datasets = {"long": {}, "short": {}}
        >>> node = {"_component_": "torchtune.datasets.mixed_dataset", "datasets": datasets, "stop": "first"}
        >>> torchtune.datasets.mixture_examples({**node, "weights": {"long": 1, "short": 1}}, [100, 10])
        20
    """
    names = tuple(str(name) for name in node["datasets"])
    weights = mixture_weights(names, sizes, node.get("weights"), node.get("temperature", 1.0))
    return sum(mixture_counts(sizes, weights, node.get("stop", "repeat")))


def mixed_dataset(
    tokenizer: Any,
    *,
    datasets: dict[str, Annotated[Component, RuntimeArgs("tokenizer")]],
    weights: dict[str, float] | None = None,
    temperature: float = 1.0,
    stop: Stop = "repeat",
) -> MixedDataset | MixedStream:
    """Build a weighted mixture of datasets, with a loss per dataset in the metrics.

    Args:
        tokenizer: passed to every dataset.
        datasets: name -> node with ``_component_``, or a dataset.
        weights: see :class:`MixedDataset`.
        temperature: see :class:`MixedDataset`.
        stop: see :class:`MixedDataset`.

    Raises:
        DataError: see :class:`MixedDataset` and the datasets.

    Example:
        >>> questions = {"_component_": "torchtune.datasets.instruct_dataset"}
        >>> questions["source"] = [{"input": "the cat", "output": "a bird"}] * 4
        >>> rows = [{"tokens": [n], "labels": [n]} for n in range(2)]
        >>> mixture = torchtune.datasets.mixed_dataset(tokenizer, datasets={"questions": questions, "rows": rows})
        >>> mixture.names, len(mixture)
        (('questions', 'rows'), 6)
    """
    if not datasets:
        raise DataError("datasets: the mixture is empty: give each dataset a name and a _component_.")
    # Raises for wrong weights before the rows are tokenized; the numbers of rows are not known yet.
    mixture_weights(tuple(map(str, datasets)), [1] * len(datasets), weights, temperature)
    parts = {}
    for name, node in datasets.items():
        if isinstance(node, Mapping):
            parts[name] = instantiate_dataset(node, tokenizer)
        else:
            parts[name] = as_example_dataset(node)
    if not any(dataset.is_stream for dataset in parts.values()):
        return MixedDataset(parts, weights, temperature, stop)
    if stop != "repeat":
        raise DataError(f"stop={stop} needs to know when a dataset ends, which a stream does not say: use stop=repeat.")
    return MixedStream(parts, weights, temperature)


def instantiate_collate(collate_fn: str | Callable[..., Any], tokenizer: Any) -> Callable[[list[Any]], Batch]:
    """Return the collate function of a dotted path; its ``padding_idx``, if any, is the tokenizer's ``pad_id``.

    If the function returns dicts, they are checked and converted to batches (:meth:`Batch.from_dict
    <torchtune.data.Batch.from_dict>`).

    Raises:
        DataError: it is no function, or takes text only while the tokenizer returns images; when called, see
            :meth:`Batch.from_dict <torchtune.data.Batch.from_dict>`.

    Example:
        >>> collate = torchtune.datasets.instantiate_collate("torchtune.data.collate_documents", tokenizer)
        >>> collate([{"tokens": [1, 2], "labels": [2, -100]}]).num_labels
        1
    """
    collate: Any = collate_fn
    if isinstance(collate_fn, str):
        collate = locate(collate_fn)
    if not callable(collate):
        raise DataError(f"collate_fn: {collate_fn} is a {type(collate).__name__}: name a function.")
    # Patches of images are concatenated as tokens are; models with cross-attention take tiles and a mask.
    collate_images = padded_collate_tiled_images_and_mask
    if getattr(tokenizer, "gives_patches", False):
        collate_images = collate_documents
    takes_images = getattr(tokenizer, "takes_images", False)
    # Only the collate functions of this library that drop images are known; any other one may take them.
    if takes_images and collate != collate_images and collate in (collate_documents, padded_collate_sft):
        raise DataError(
            f"collate_fn: {collate.__name__} does not take the images of the tokenizer: set "
            f"collate_fn=torchtune.data.{collate_images.__name__}."
        )
    signature = inspect.signature(collate)
    if _is_own(collate) and signature.return_annotation is Batch:  # nothing to check or convert
        return collate
    settings = {}
    if "padding_idx" in signature.parameters:
        settings["padding_idx"] = getattr(tokenizer, "pad_id", 0)

    def collated(examples: list[Any]) -> Batch:
        batch = Batch.from_dict(collate(examples, **settings))
        if batch.labels is None:  # from_dict accepts batches of prompts, which have none
            raise DataError(f"collate_fn: the batch has no 'labels', it has {', '.join(batch)}.")
        return batch

    return collated


def _is_own(function: Any) -> bool:
    """Return whether a function, a class or an object's class is defined in this library, or inherits from it."""
    kind = type(function)
    if hasattr(function, "__qualname__"):  # a function or a class
        kind = function
    return any(base.__module__.startswith("torchtune.") for base in getattr(kind, "__mro__", [kind]))
