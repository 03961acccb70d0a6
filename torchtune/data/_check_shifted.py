"""Check that labels are shifted."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from torchtune.data._common import CROSS_ENTROPY_IGNORE_IDX, DataError


def check_shifted(
    tokens: torch.Tensor, labels: torch.Tensor, lengths: Sequence[int] | None = None, name: str = "an example"
) -> None:
    """Check that labels are shifted: ``labels[i]`` is the token after position ``i``, unlike in ``transformers``.

    With unshifted labels a model learns to repeat its input. Rows that fit both conventions pass, such as rows
    with one repeated token.

    Args:
        tokens: int64 ``[b, s]`` or ``[s]``; not checked on an accelerator.
        labels: same shape as ``tokens``.
        lengths: lengths of the documents, and of the padding between them, in the flattened positions; by default each
            row is one document.
        name: name of the rows, for the error message.

    Raises:
        DataError: every label equals the token at its own position instead of the next token.
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
