"""Datasets and collation as recipes name them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torchtune import config
from torchtune.config._locate import locate
from torchtune.data import Batch, DataError, collate_documents, padded_collate_sft
from torchtune.datasets._concat import ConcatDataset
from torchtune.datasets._own import CheckedDataset, checked_collate, is_own
from torchtune.utils import doing


@doing("preparing data")
def instantiate_dataset(dataset: Any, tokenizer: Any) -> Any:
    """The dataset of a config node; a list of nodes gives them one after another.

    Args:
        dataset: node with ``_component_``, or a list of them.
        tokenizer: handed to every dataset.

    Raises:
        DataError: see the datasets; one of somebody else is empty, or its examples lack ``tokens`` and ``labels``.

    Example:
        >>> rows = [{"input": "Who?", "output": "one cat"}]
        >>> node = {"_component_": "torchtune.datasets.instruct_dataset", "source": rows}
        >>> len(torchtune.datasets.instantiate_dataset(node, tokenizer))
        1
    """
    if isinstance(dataset, Sequence) and not isinstance(dataset, Mapping | str):
        parts = [_checked(config.instantiate(node, tokenizer), tokenizer) for node in dataset]
        return parts[0] if len(parts) == 1 else ConcatDataset(parts)
    return _checked(config.instantiate(dataset, tokenizer), tokenizer)


def _checked(dataset: Any, tokenizer: Any) -> Any:
    if is_own(dataset):
        return dataset
    return CheckedDataset(dataset, getattr(tokenizer, "vocab_size", None))


def instantiate_collate(collate_fn: str | Callable[..., Any], tokenizer: Any) -> Callable[[list[Any]], Batch]:
    """The collate function of a dotted path, padding with the tokenizer's ``pad_id`` if it pads.

    Dicts that it returns become batches here (:meth:`Batch.from_dict <torchtune.data.Batch.from_dict>`). What a
    function from outside this library returns is checked first.

    Raises:
        DataError: it pads on the left, which a causal model cannot be trained with; it takes text only, but the
            tokenizer gives images; when called, see
            :meth:`Batch.from_dict <torchtune.data.Batch.from_dict>`.

    Example:
        >>> collate = torchtune.datasets.instantiate_collate("torchtune.data.collate_documents", tokenizer)
        >>> collate([{"tokens": [1, 2], "labels": [2, -100]}]).num_labels
        1
    """
    collate = locate(collate_fn) if isinstance(collate_fn, str) else collate_fn
    if getattr(collate, "__name__", "") == "left_pad_sequence":
        raise DataError("collate_fn: left_pad_sequence does not make batches for training: use collate_documents.")
    if getattr(tokenizer, "takes_images", False) and collate in (collate_documents, padded_collate_sft):
        raise DataError(
            f"collate_fn: {collate.__name__} takes text only, but the tokenizer gives images: set "
            "collate_fn=torchtune.data.padded_collate_tiled_images_and_mask."
        )
    signature, own = inspect.signature(collate), is_own(collate)
    if own and signature.return_annotation is Batch:
        return collate
    collate = collate if own else checked_collate(collate)
    if "padding_idx" in signature.parameters:
        collate = partial(collate, padding_idx=getattr(tokenizer, "pad_id", 0))
    return lambda examples: Batch.from_dict(collate(examples))
