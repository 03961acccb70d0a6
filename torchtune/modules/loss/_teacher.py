"""What a teacher says of the positions of a batch, as losses of distillation read it."""

from typing import Protocol

import torch
from torch import Tensor

from torchtune.modules.loss._linear_divergence import Logits
from torchtune.modules.loss._projection import Projection


class TeacherOutputs(Protocol):
    """Next-token distributions of a teacher at the positions of a batch."""

    vocab_size: int

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
    """

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
