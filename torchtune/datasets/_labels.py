"""Labels of token rows: the token to predict at each position, or -100 where no token is trained on.

A transform to messages masks turns (:func:`torchtune.data.mask_messages`), the tokenizer masks the tokens of these
turns, and :func:`shifted_labels` turns tokens and mask into labels. Other places that decide on labels:
``datasets/_text_completion.py`` labels all tokens, ``tokenizers/_reasoning.py`` masks the earlier turns of split
conversations, ``models/_image_transform.py`` masks turns with images, and ``rlhf/_rollouts.py`` labels answers.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError

NO_LABEL = "no label is left"
_INT32 = np.iinfo(np.int32)


def shifted_labels(tokens: Sequence[int], mask: Sequence[bool]) -> list[int] | np.ndarray:
    """Return pre-shifted labels: label i is token i + 1, or -100 if that token is masked; the last label is -100.

    Returns:
        a list; int32 ``[s]`` if ``tokens`` is an ``array("i")``.

    Raises:
        DataError: tokens and mask differ in length.
    """
    if len(tokens) != len(mask):
        raise DataError(f"the model transform gives {len(tokens)} tokens but {len(mask)} elements of a mask")
    ids, is_trained = _array(tokens), ~np.asarray(mask, bool)[1:]
    labels = np.full_like(ids, CROSS_ENTROPY_IGNORE_IDX)
    labels[:-1][is_trained] = ids[1:][is_trained]
    return labels if isinstance(tokens, array) else labels.tolist()


def has_label(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample has a label that is not ignored."""
    return bool((np.asarray(sample["labels"]) != CROSS_ENTROPY_IGNORE_IDX).any())


def check_row(tokens: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels as int32 ``[s]``; raise :class:`DataError` unless both are ids of equal length."""
    for name, values in (("tokens", tokens), ("labels", labels)):
        if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping):
            raise DataError(f"{name} must be a list of token ids, not {type(values).__name__}")
    if len(tokens) != len(labels):
        raise DataError(f"a row has {len(tokens)} tokens but {len(labels)} labels")
    ids, targets = _array(tokens), _array(labels)
    for name, values in (("tokens", ids), ("labels", targets)):
        if len(values) and values.dtype.kind not in "iu":
            raise DataError(f"{name} must be a flat list of whole numbers, not of {values.dtype}")
    if len(ids) and (ids.min() < 0 or ids.max() > _INT32.max):
        raise DataError(f"token id {ids.min() if ids.min() < 0 else ids.max()} is none")
    odd = targets[(targets < 0) & (targets != CROSS_ENTROPY_IGNORE_IDX)]
    if len(odd):
        raise DataError(f"label {odd.min()} is neither a token id nor {CROSS_ENTROPY_IGNORE_IDX}")
    return ids.astype(np.int32, copy=False), targets.astype(np.int32, copy=False)


def _array(values: Any) -> np.ndarray:
    try:
        found = np.asarray(values)
    except ValueError:  # ragged lists
        found = np.empty((0, 0))
    if found.ndim != 1:
        raise DataError("tokens and labels must be flat lists of token ids")
    return found
