"""Shared code of the dataset builders."""

from typing import Any

from torchtune.data import DataError, Transform
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._row_source import Source
from torchtune.datasets._sft import SFTDataset, SFTTransform
from torchtune.datasets._streamed import StreamedDataset


def pack_length(tokenizer: Any) -> int:
    """Return the tokenizer's ``max_seq_len`` as pack length; raise :class:`DataError` if it is not set."""
    length = getattr(tokenizer, "max_seq_len", None)
    if length is None:
        raise DataError("packed=True needs the length of a pack: set the tokenizer's max_seq_len.")
    return length


def sft_dataset(
    tokenizer: Any, source: Source, message_transform: Transform, *, packed: bool, **settings: Any
) -> SFTDataset | PackedDataset | StreamedDataset:
    """Build an :class:`SFTDataset` (packed if ``packed``) or, with ``streaming=True``, a :class:`StreamedDataset`.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.
    """
    length = pack_length(tokenizer) if packed else None
    if settings.get("streaming"):
        if getattr(tokenizer, "reasoning", None) == "split":
            raise DataError("reasoning=split makes several samples of a row: leave streaming out.")
        checks = {name: settings.pop(name) for name in ("allow_any_order", "allow_empty_answers") if name in settings}
        return StreamedDataset(
            SFTTransform(message_transform, tokenizer, **checks).as_arrays,
            source,
            limit=getattr(tokenizer, "max_seq_len", None),
            side=getattr(tokenizer, "truncation_type", "right"),
            tokenizer=tokenizer,
            pack_length=length,
            **settings,
        )
    dataset = SFTDataset(source=source, message_transform=message_transform, model_transform=tokenizer, **settings)
    return dataset if length is None else PackedDataset(dataset, max_seq_len=length)
