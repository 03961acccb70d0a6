"""Divergences between a student's and a teacher's next-token distributions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Divergence = Callable[[Tensor, Tensor], Tensor]


def _expected_log_ratio(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p‖q) of every row, in float32 at least; entries infinite on either side are left out: [..., v] -> [...]."""
    compute = torch.promote_types(p_logits.dtype, torch.float32)
    excluded = torch.isinf(p_logits) | torch.isinf(q_logits)
    log_p = torch.log_softmax(p_logits, -1, dtype=compute)
    log_q = torch.log_softmax(q_logits, -1, dtype=compute)
    log_ratio = log_p.masked_fill(excluded, 0.0) - log_q.masked_fill(excluded, 0.0)
    return (log_p.exp() * log_ratio).sum(-1)


def forward_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher‖student) of every position: [..., v] -> [...]."""
    return _expected_log_ratio(teacher_logits, student_logits)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(student‖teacher) of every position: [..., v] -> [...]."""
    return _expected_log_ratio(student_logits, teacher_logits)


class _KLLoss(nn.Module, ABC):
    """Mean divergence over the labelled positions."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    @abstractmethod
    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Divergence of every position: [..., v] -> [...]."""

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, normalize: bool = True) -> Tensor:
        """Mean over labelled positions (0 where there is none), or their sum.

        Args:
            student_logits: [b, s, v] or [n, v].
            teacher_logits: same shape; takes no gradient if it needs none.
            labels: [b, s] or [n]; only whether they equal ``ignore_index`` matters.
            normalize: divide by the number of labelled positions.

        Returns:
            scalar, float32 (float64 for float64 logits).
        """
        total, count = self.sum_and_count(student_logits, teacher_logits, labels)
        return total / count.clamp(min=1) if normalize else total

    def sum_and_count(self, student_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence summed over labelled positions (scalar), and their number (int64 scalar)."""
        labelled = labels != self.ignore_index
        total = self.divergence(student_logits, teacher_logits).masked_fill(~labelled, 0.0).sum()
        return total, labelled.sum()


class ForwardKLLoss(_KLLoss):
    """Mean of KL(teacher‖student) over labelled positions: the student covers all that the teacher finds likely.

    Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, at temperature 1.

    Args:
        ignore_index: label of positions without a label.
    """

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """KL(teacher‖student) of every position."""
        return forward_kl(student_logits, teacher_logits)


class ReverseKLLoss(_KLLoss):
    """Mean of KL(student‖teacher) over labelled positions: the student avoids what the teacher finds unlikely.

    Gu et al., "MiniLLM", 2024.

    Args:
        ignore_index: label of positions without a label.
    """

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """KL(student‖teacher) of every position."""
        return reverse_kl(student_logits, teacher_logits)


class SymmetricKLLoss(_KLLoss):
    """Weighted sum of forward and reverse KL.

    Args:
        sym_kd_ratio: weight of the forward KL; the reverse KL has the rest.
        ignore_index: label of positions without a label.

    Raises:
        ValueError: ``sym_kd_ratio`` outside [0, 1].
    """

    def __init__(self, sym_kd_ratio: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__(ignore_index)
        if not 0.0 <= sym_kd_ratio <= 1.0:
            raise ValueError(f"sym_kd_ratio is {sym_kd_ratio}: give a number from 0 to 1.")
        self.sym_kd_ratio = sym_kd_ratio

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Weighted sum of both divergences of every position."""
        forward, reverse = forward_kl(student_logits, teacher_logits), reverse_kl(student_logits, teacher_logits)
        return self.sym_kd_ratio * forward + (1.0 - self.sym_kd_ratio) * reverse


class _ChunkedKLLoss(nn.Module):
    """Mean divergence over the labelled positions of logits that come in chunks along the sequence."""

    def __init__(self, num_output_chunks: int, loss: _KLLoss) -> None:
        super().__init__()
        if num_output_chunks < 1:
            raise ValueError(f"num_output_chunks is {num_output_chunks}: it must be at least 1.")
        self.num_output_chunks = num_output_chunks
        self.ignore_index = loss.ignore_index
        self._loss = loss

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the divergence of one chunk (arguments of ``torch.compile``); return the loss itself."""
        self._loss.divergence = torch.compile(self._loss.divergence, *args, **kwargs)
        return self

    def forward(self, student_logits: Sequence[Tensor], teacher_logits: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Mean over labelled positions, 0 where there is none.

        Args:
            student_logits: ``num_output_chunks`` tensors [b, s / chunks, v].
            teacher_logits: as many tensors of the same shapes.
            labels: [b, s].

        Returns:
            scalar, float32 (float64 for float64 logits).

        Raises:
            ValueError: the chunks do not cover the labels.
        """
        total, count = self.sum_and_count(student_logits, teacher_logits, labels)
        return total / count.clamp(min=1)

    def sum_and_count(
        self, student_logits: Sequence[Tensor], teacher_logits: Sequence[Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Divergence summed over labelled positions (scalar), and their number (int64 scalar); see :meth:`forward`."""
        lengths = [chunk.shape[1] for chunk in student_logits]
        if sum(lengths) != labels.shape[1] or len(lengths) != len(teacher_logits):
            raise ValueError(
                f"{len(lengths)} chunks of student logits cover {sum(lengths)} positions and there are "
                f"{len(teacher_logits)} chunks of teacher logits, but labels have {labels.shape[1]} positions: "
                "give both logits in the same chunks along the sequence."
            )
        chunks = zip(student_logits, teacher_logits, labels.split(lengths, dim=1), strict=True)
        total = sum(self._loss(student, teacher, label, normalize=False) for student, teacher, label in chunks)
        return total, (labels != self.ignore_index).sum()


class ForwardKLWithChunkedOutputLoss(_ChunkedKLLoss):
    """:class:`ForwardKLLoss` of logits in chunks, so that float32 copies of all logits never exist at once.

    Args:
        num_output_chunks: number of chunks.
        ignore_index: label of positions without a label.
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100) -> None:
        super().__init__(num_output_chunks, ForwardKLLoss(ignore_index))


class ReverseKLWithChunkedOutputLoss(_ChunkedKLLoss):
    """:class:`ReverseKLLoss` of logits in chunks.

    Args:
        num_output_chunks: number of chunks.
        ignore_index: label of positions without a label.
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100) -> None:
        super().__init__(num_output_chunks, ReverseKLLoss(ignore_index))


class SymmetricKLWithChunkedOutputLoss(_ChunkedKLLoss):
    """:class:`SymmetricKLLoss` of logits in chunks.

    Args:
        num_output_chunks: number of chunks.
        sym_kd_ratio: weight of the forward KL.
        ignore_index: label of positions without a label.
    """

    def __init__(self, num_output_chunks: int = 8, sym_kd_ratio: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__(num_output_chunks, SymmetricKLLoss(sym_kd_ratio, ignore_index))
        self.sym_kd_ratio = sym_kd_ratio
