"""What a teacher says of the positions of a batch, as losses of distillation read it."""

import math
from typing import Protocol

import torch
from torch import Tensor

from torchtune.modules.loss._linear_divergence import Logits
from torchtune.modules.loss._projection import Projection


class TeacherOutputs(Protocol):
    """Next-token distributions of a teacher at the positions of a batch."""

    vocab_size: int
    are_likeliest: bool  # whether pair() has made them those of a loss with top_k

    def select(self, index: Tensor, vocab_size: int) -> "TeacherOutputs":
        """Of some positions, int64 [n], over the first ``vocab_size`` tokens."""

    def pair(self, student_logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """What is compared at some of the positions: the student's logits [n, v] -> (student's, teacher's) [n, c]."""


class TeacherStates:
    """Hidden states of a teacher, whose logits are made a chunk at a time; they take no gradient.

    Args:
        hidden: what ``teacher(..., output="hidden")`` returns [b, s, d]; d need not be the student's.
        projection: ``teacher.output``.
        vocab_size: number of logits that count, the first ones; all by default.

    Example:
        >>> states = torchtune.modules.loss.TeacherStates(torch.zeros(3, 4), torch.nn.Linear(4, 10))
        >>> states.select(torch.tensor([0, 2]), 10).logits(slice(0, 2)).shape
        torch.Size([2, 10])
    """

    are_likeliest = False

    def __init__(self, hidden: Tensor, projection: Projection, vocab_size: int | None = None) -> None:
        self.vocab_size = len(projection.weight) if vocab_size is None else vocab_size
        self._hidden, self._projection = hidden.detach().flatten(0, -2), projection
        self._logits = Logits(projection, self.vocab_size)

    def select(self, index: Tensor, vocab_size: int) -> "TeacherStates":
        """See :class:`TeacherOutputs`."""
        return TeacherStates(self._hidden.index_select(0, index), self._projection, vocab_size)

    @torch.no_grad()
    def logits(self, rows: slice) -> Tensor:
        """Logits of some positions [n, v]."""
        return self._logits(self._hidden[rows])

    def pair(self, student_logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """See :class:`TeacherOutputs`: the logits of both."""
        return student_logits, self.logits(rows)


class LikeliestTokens:
    """Log-probs of a teacher's likeliest tokens, and of all others together as one more; they take no gradient.

    The others are kept as one bucket, so that the distributions of teacher and student stay what they are: nothing is
    renormalised, and a student that gives mass to unlikely tokens pays for it.

    Args:
        tokens: int64 [n, k].
        log_probs: of these, and of the rest [n, k + 1], float32 at least.
        vocab_size: number of tokens over which the distributions are normalised, the first ones.
        temperature: divided the teacher's logits, and divides the student's.

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
        """Of logits [n, v]. Raises ``ValueError`` if ``k`` is not below v."""
        if k >= logits.shape[-1]:
            raise ValueError(f"top_k is {k}: it must be below the {logits.shape[-1]:,} tokens of the vocabulary.")
        scaled = logits if temperature == 1.0 else logits / temperature
        log_probs = torch.log_softmax(scaled, -1, dtype=torch.promote_types(scaled.dtype, torch.float32))
        tokens = log_probs.topk(k, dim=-1).indices
        return cls(tokens, _with_rest(log_probs, tokens), logits.shape[-1], temperature)

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Tokens [n, k] and log-probs [n, k + 1]."""
        return self._tokens, self._log_probs

    def select(self, index: Tensor, vocab_size: int) -> "LikeliestTokens":
        """See :class:`TeacherOutputs`. Raises ``ValueError`` for another ``vocab_size``."""
        if vocab_size != self.vocab_size:
            raise ValueError(f"The teacher's log-probs are of {self.vocab_size:,} tokens, not of {vocab_size:,}.")
        return LikeliestTokens(self._tokens[index], self._log_probs[index], vocab_size, self._temperature)

    def pair(self, student_logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """See :class:`TeacherOutputs`: log-probs of both [n, k + 1]."""
        scaled = student_logits if self._temperature == 1.0 else student_logits / self._temperature
        log_probs = torch.log_softmax(scaled, -1, dtype=torch.promote_types(scaled.dtype, torch.float32))
        return _with_rest(log_probs, self._tokens[rows]), self._log_probs[rows]


def _with_rest(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs [n, v] of some tokens [n, k], and of all others together: [n, k + 1]."""
    rest = log_probs.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, tokens), rest], dim=-1)
