"""Shared definitions of the data package."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from torchtune.utils import UserError

# Label of a position that is excluded from the loss.
CROSS_ENTROPY_IGNORE_IDX = -100


class DataError(UserError, ValueError):
    """Invalid data, prompt template or tokenizer file; for invalid rows, the message names them."""


class SourceNumber(int):
    """Index of a mixture example's dataset; ``names`` are the names of all datasets."""

    names: tuple[str, ...] = ()


class Transform(Protocol):
    """Callable that converts a sample: a row to messages, or messages to tokens."""

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the converted sample."""
        ...


def check_tokenizer(tokenizer: Any) -> None:
    """Raise :class:`DataError` for a tokenizer of transformers, which has another interface."""
    if any(base.__module__.partition(".")[0] == "transformers" for base in type(tokenizer).__mro__):
        raise DataError(
            f"tokenizer: a {type(tokenizer).__name__} of transformers masks and ends nothing here: give "
            "torchtune.tokenizers.hf_tokenizer(folder), which reads the same files."
        )


def check_shifted(
    tokens: torch.Tensor, labels: torch.Tensor, lengths: Sequence[int] | None = None, name: str = "an example"
) -> None:
    """Check that labels are shifted: ``labels[i]`` is the token after position ``i``, unlike in ``transformers``.

    With unshifted labels a model learns to repeat its input. Rows that fit both conventions pass, such as those with
    one repeated token.

    Args:
        tokens: int64 ``[b, s]`` or ``[s]``; not checked on an accelerator.
        labels: same shape as ``tokens``.
        lengths: lengths of the documents, and of the padding between them, in the flattened positions; by default each
            row is one document.
        name: name of the rows, for the message.

    Raises:
        DataError: every label equals the token at its position, and not the next one.
    """
    if tokens.device.type != "cpu" or type(tokens) is not torch.Tensor:  # no synchronization, no fake tensors
        return
    known = labels != CROSS_ENTROPY_IGNORE_IDX
    if not known.any() or (known & (labels != tokens)).any():
        return
    known = known.flatten().clone()
    tokens, ends = tokens.flatten(), [tokens.shape[-1]] * (len(tokens) if tokens.dim() > 1 else 1)
    values = tokens[known]
    known[torch.tensor(list(accumulate(ends if lengths is None else lengths))) - 1] = False  # no next token
    is_next = tokens[1:] == tokens[:-1]
    if (known[:-1] & ~is_next).any() and (values != values[0]).any():
        raise DataError(
            f"The labels of {name} are the tokens at their own position, as transformers takes them: labels[i] is the "
            f"token to predict at position i, and {CROSS_ENTROPY_IGNORE_IDX} where none is: shift them, as in "
            f"labels = [*labels[1:], {CROSS_ENTROPY_IGNORE_IDX}]."
        )


def copy_sample(sample: Any, giver: str) -> dict[str, Any]:
    """Copy a sample returned by ``giver``. Raises :class:`DataError` if it is not a mapping."""
    if not isinstance(sample, Mapping):
        raise DataError(f"{giver} gives {type(sample).__name__}, not a mapping")
    return dict(sample)
