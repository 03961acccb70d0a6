"""Outputs of a teacher for a batch, in the form that distillation losses read."""

import math
from typing import Protocol

import torch
from torch import Tensor

from torchtune.modules.loss._chunked_logits import Logits, Projection


class TeacherOutputs(Protocol):
    """Interface of a teacher's next-token distributions at the positions of a batch."""

    vocab_size: int
    are_likeliest: bool  # whether pair() returns the distributions of a loss with top_k

    def select(self, index: Tensor, vocab_size: int) -> "TeacherOutputs":
        """Select positions, int64 [n], and the first ``vocab_size`` tokens."""

    def pair(self, student_logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return comparable (student's, teacher's) logits [n, c] of some positions; the student's logits are [n, v]."""


class TeacherStates:
    """Hidden states of a teacher, from which logits are computed chunk by chunk, without gradient.

    Args:
        hidden: result of ``teacher(..., output="hidden")`` [b, s, d]; d may differ from the student's.
        projection: ``teacher.output``.
        vocab_size: use only the first ``vocab_size`` logits; by default all.

    Example:
        >>> states = torchtune.modules.loss.TeacherStates(torch.zeros(3, 4), torch.nn.Linear(4, 10))
        >>> states.select(torch.tensor([0, 2]), 10).logits(slice(0, 2)).shape
        torch.Size([2, 10])
    """

    are_likeliest = False

    def __init__(self, hidden: Tensor, projection: Projection, vocab_size: int | None = None) -> None:
        self.vocab_size = len(projection.weight) if vocab_size is None else vocab_size
        self._hidden, self._projection = hidden.detach().flatten(0, -2), projection
        self._logits = Logits.of(projection)

    def select(self, index: Tensor, vocab_size: int) -> "TeacherStates":
        """See :class:`TeacherOutputs`."""
        return TeacherStates(self._hidden.index_select(0, index), self._projection, vocab_size)

    @torch.no_grad()
    def logits(self, rows: slice) -> Tensor:
        """Compute the logits [n, v] of some positions."""
        return self._logits.whole(self._logits(self._hidden[rows]), self.vocab_size)

    def pair(self, student_logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """See :class:`TeacherOutputs`; returns the logits of both."""
        return student_logits, self.logits(rows)


class LikeliestTokens:
    """Log-probs of a teacher's k likeliest tokens, and of all other tokens as one bucket, without gradient.

    The bucket avoids renormalizing the distributions: the loss also penalizes a student for probability on unlikely
    tokens.

    Args:
        tokens: int64 [n, k].
        log_probs: log-probs of the tokens and of the bucket [n, k + 1], at least float32.
        vocab_size: the distributions are over the first ``vocab_size`` tokens.
        temperature: divisor of the logits of teacher and student.

    Example:
        >>> from torchtune.modules.loss import LikeliestTokens
        >>> teacher = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
        >>> tokens, log_probs = LikeliestTokens.of(teacher, k=2).arrays()
        >>> tokens.tolist(), [round(p, 4) for p in log_probs.exp()[0].tolist()]
        ([[0, 1]], [0.5, 0.3, 0.2])
    """

    are_likeliest = True

    def __init__(self, tokens: Tensor, log_probs: Tensor, vocab_size: int, temperature: float = 1.0) -> None:
        self.vocab_size, self._tokens, self._log_probs = vocab_size, tokens, log_probs
        self._temperature = temperature

    @classmethod
    @torch.no_grad()
    def of(cls, logits: Tensor, k: int, temperature: float = 1.0) -> "LikeliestTokens":
        """Take the k likeliest tokens of logits [n, v]. Raises ``ValueError`` if ``k`` is not below v."""
        if k >= logits.shape[-1]:
            raise ValueError(f"top_k is {k}: it must be below the {logits.shape[-1]:,} tokens of the vocabulary.")
        scaled = logits if temperature == 1.0 else logits / temperature
        log_probs = torch.log_softmax(scaled, -1, dtype=torch.promote_types(scaled.dtype, torch.float32))
        tokens = log_probs.topk(k, dim=-1).indices
        return cls(tokens, _add_rest_bucket(log_probs, tokens), logits.shape[-1], temperature)

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Return tokens [n, k] and log-probs [n, k + 1]."""
        return self._tokens, self._log_probs

    def select(self, index: Tensor, vocab_size: int) -> "LikeliestTokens":
        """See :class:`TeacherOutputs`. Raises ``ValueError`` for another ``vocab_size``."""
        if vocab_size != self.vocab_size:
            raise ValueError(f"The teacher's log-probs are of {self.vocab_size:,} tokens, not of {vocab_size:,}.")
        return LikeliestTokens(self._tokens[index], self._log_probs[index], vocab_size, self._temperature)

    def pair(self, student_logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """See :class:`TeacherOutputs`; returns log-probs of both [n, k + 1]."""
        scaled = student_logits if self._temperature == 1.0 else student_logits / self._temperature
        log_probs = torch.log_softmax(scaled, -1, dtype=torch.promote_types(scaled.dtype, torch.float32))
        return _add_rest_bucket(log_probs, self._tokens[rows]), self._log_probs[rows]


def _add_rest_bucket(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs [n, k + 1] of the tokens [n, k] and of all others together, from log-probs [n, v]."""
    rest = log_probs.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, tokens), rest], dim=-1)
