"""What the builders of named datasets share."""

from collections.abc import Callable
from typing import Any

from torchtune.data import DataError, Transform
from torchtune.datasets._load import Source
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._sft import SFTDataset


def pack_length(tokenizer: Any) -> int:
    """Length of a pack. Raises :class:`DataError` where the tokenizer does not say it."""
    length = getattr(tokenizer, "max_seq_len", None)
    if length is None:
        raise DataError("packed=True needs the length of a pack: set the tokenizer's max_seq_len.")
    return length


def sft_dataset(
    tokenizer: Any,
    source: Source,
    message_transform: Transform,
    *,
    packed: bool,
    filter_fn: Callable[..., bool] | None,
    split: str,
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """An :class:`SFTDataset`, packed if asked.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.
    """
    length = pack_length(tokenizer) if packed else None
    dataset = SFTDataset(
        source=source,
        message_transform=message_transform,
        model_transform=tokenizer,
        filter_fn=filter_fn,
        split=split,
        **load_dataset_kwargs,
    )
    if length is None:
        return dataset
    return PackedDataset(dataset, max_seq_len=length, padding_idx=getattr(tokenizer, "pad_id", 0))
