"""Shared definitions of the data package."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from torchtune.utils import UserError

# Ignore index: label of a position without a loss.
CROSS_ENTROPY_IGNORE_IDX = -100


class DataError(UserError, ValueError):
    """Invalid data, prompt template or tokenizer file; the message names the rows if rows are invalid."""


class SourceNumber(int):
    """The ``source`` of an example of a mixture: its number among ``names``."""

    names: tuple[str, ...] = ()


class Transform(Protocol):
    """Maps one sample to another: a row to messages, or messages to tokens."""

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """The changed sample."""
        ...


def check_tokenizer(tokenizer: Any) -> None:
    """Raise :class:`DataError` for a tokenizer of transformers, whose calls mean something else."""
    if any(base.__module__.partition(".")[0] == "transformers" for base in type(tokenizer).__mro__):
        raise DataError(
            f"tokenizer: a {type(tokenizer).__name__} of transformers masks and ends nothing here: give "
            "torchtune.modules.transforms.tokenizers.hf_tokenizer(folder), which reads the same files."
        )


def check_shifted(
    tokens: torch.Tensor, labels: torch.Tensor, lengths: Sequence[int] | None = None, name: str = "an example"
) -> None:
    """Check that labels are not the tokens at their own position, the convention of ``transformers``.

    A model trained on such rows learns to repeat its input. Rows in which the next token is that at the own position
    wherever there is a label, such as those of one repeated token, fit both conventions and pass.

    Args:
        tokens: int64 ``[b, s]`` or ``[s]``; on an accelerator they are not read.
        labels: of the same shape.
        lengths: of the documents, and of the padding between them, in the flattened positions; by default each row is
            one document.
        name: of the rows, for the message.

    Raises:
        DataError: every label is the token at its own position, and not the next one.
    """
    if tokens.device.type != "cpu" or type(tokens) is not torch.Tensor:  # the host would wait, or it is a fake tensor
        return
    known = labels != CROSS_ENTROPY_IGNORE_IDX
    if not known.any() or (known & (labels != tokens)).any():
        return
    known = known.flatten().clone()
    tokens, ends = tokens.flatten(), [tokens.shape[-1]] * (len(tokens) if tokens.dim() > 1 else 1)
    values = tokens[known]
    known[torch.tensor(list(accumulate(ends if lengths is None else lengths))) - 1] = False  # nothing follows there
    is_next = tokens[1:] == tokens[:-1]
    if (known[:-1] & ~is_next).any() and (values != values[0]).any():
        raise DataError(
            f"The labels of {name} are the tokens at their own position, as transformers takes them: labels[i] is the "
            f"token to predict at position i, and {CROSS_ENTROPY_IGNORE_IDX} where none is: shift them, as in "
            f"labels = [*labels[1:], {CROSS_ENTROPY_IGNORE_IDX}]."
        )


def as_sample(sample: Any, giver: str) -> dict[str, Any]:
    """A copy of a sample that ``giver`` returned. Raises :class:`DataError` if it is not a mapping."""
    if not isinstance(sample, Mapping):
        raise DataError(f"{giver} gives {type(sample).__name__}, not a mapping")
    return dict(sample)
