"""Datasets, mixtures and collate functions of configs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from torchtune import config
from torchtune.config import Component, RuntimeArgs, locate
from torchtune.data import (
    Batch,
    DataError,
    ExampleDataset,
    as_example_dataset,
    collate_documents,
    padded_collate_sft,
    padded_collate_tiled_images_and_mask,
)
from torchtune.datasets._mixed import ConcatDataset, MixedDataset, MixedStream, Stop, mixture_counts, mixture_weights
from torchtune.datasets._user_dataset import CheckedDataset
from torchtune.tokenizers import check_tokenizer
from torchtune.utils import doing


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
        instantiated = parts[0] if len(parts) == 1 else ConcatDataset(parts)
    else:
        instantiated = _instantiate_node(dataset, tokenizer)
    if longest is not None:
        instantiated.limit_rows(longest)
    return instantiated


def _instantiate_node(node: Any, tokenizer: Any) -> ExampleDataset:
    dataset = config.instantiate(node, tokenizer)
    if isinstance(dataset, ExampleDataset):
        return dataset
    return CheckedDataset(dataset, getattr(tokenizer, "vocab_size", None))


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
    mixture_weights(tuple(map(str, datasets)), [1] * len(datasets), weights, temperature)  # fail before tokenization
    parts = {}
    for name, node in datasets.items():
        parts[name] = instantiate_dataset(node, tokenizer) if isinstance(node, Mapping) else as_example_dataset(node)
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
    collate = locate(collate_fn) if isinstance(collate_fn, str) else collate_fn
    if not callable(collate):
        raise DataError(f"collate_fn: {collate_fn} is a {type(collate).__name__}: name a function.")
    takes_images = getattr(tokenizer, "takes_images", False)
    gives_patches = getattr(tokenizer, "gives_patches", False)
    collate_images = collate_documents if gives_patches else padded_collate_tiled_images_and_mask
    if takes_images and collate in {collate_documents, padded_collate_sft} - {collate_images}:
        raise DataError(
            f"collate_fn: {collate.__name__} does not take the images of the tokenizer: set "
            f"collate_fn=torchtune.data.{collate_images.__name__}."
        )
    signature = inspect.signature(collate)
    if _is_own(collate) and signature.return_annotation is Batch:
        return collate
    settings = {}
    if "padding_idx" in signature.parameters:
        settings["padding_idx"] = getattr(tokenizer, "pad_id", 0)

    def collated(examples: list[Any]) -> Batch:
        batch = Batch.from_dict(collate(examples, **settings))
        if batch.labels is None:
            raise DataError(f"collate_fn: the batch has no 'labels', it has {', '.join(batch)}.")
        return batch

    return collated


def _is_own(function: Any) -> bool:
    """Return whether a function, a class or an object's class is defined in this library, or inherits from it."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return any(base.__module__.startswith("torchtune.") for base in getattr(kind, "__mro__", [kind]))
