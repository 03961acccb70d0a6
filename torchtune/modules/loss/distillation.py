"""Distillation: a teacher's next-token distributions, and their divergences from a student's."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchtune.data import label_index
from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.loss.chunked_logits import ChunkedSum, Logits, chunk_slices, kept_on_device
from torchtune.modules.loss.custom_loss import Projection

Divergence = Callable[[Tensor, Tensor], Tensor]

# Maximum number of logits per chunk, and minimum number of positions: fewer make the matrix products slow.
_CHUNK_ELEMENTS = 2**25
_MIN_CHUNK_ROWS = 64


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
        self._hidden = hidden.detach().flatten(0, -2)  # [n, d]
        self._projection = projection
        self._logits = Logits.of(projection)

    def select(self, index: Tensor, vocab_size: int) -> "TeacherStates":
        """See :class:`TeacherOutputs`."""
        return TeacherStates(self._hidden.index_select(0, index), self._projection, vocab_size)

    @torch.no_grad()
    def logits(self, rows: slice) -> Tensor:
        """Compute the logits [n, v] of some positions."""
        logits = self._logits(self._hidden[rows])  # with tensor parallelism, this rank's shard
        return self._logits.gather_columns(logits, self.vocab_size)

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
        self.vocab_size = vocab_size
        self._tokens = tokens
        self._log_probs = log_probs
        self._temperature = temperature

    @classmethod
    @torch.no_grad()
    def of(cls, logits: Tensor, k: int, temperature: float = 1.0) -> "LikeliestTokens":
        """Take the k likeliest tokens of logits [n, v]. Raises ``ValueError`` if ``k`` is not below v."""
        vocab_size = logits.shape[-1]
        if k >= vocab_size:
            raise ValueError(f"top_k is {k}: it must be below the {vocab_size:,} tokens of the vocabulary.")
        log_probs = _scaled_log_softmax(logits, temperature)  # [n, v]
        tokens = log_probs.topk(k, dim=-1).indices  # [n, k]
        return cls(tokens, _append_bucket(log_probs, tokens), vocab_size, temperature)

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
        log_probs = _scaled_log_softmax(student_logits, self._temperature)  # [n, v]
        student_log_probs = _append_bucket(log_probs, self._tokens[rows])
        return student_log_probs, self._log_probs[rows]


def _scaled_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs of logits divided by the temperature, in at least float32."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, -1, dtype=compute)


def _append_bucket(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs [n, k + 1] of the tokens [n, k] and of all others together, from log-probs [n, v]."""
    log_probs_of_tokens = log_probs.gather(-1, tokens)  # [n, k]
    bucket = log_probs.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)  # [n, 1]
    return torch.cat([log_probs_of_tokens, bucket], dim=-1)


def _expectation(p_logits: Tensor, *other_logits: Tensor, of: Callable[..., Tensor]) -> Tensor:
    """Expectation of ``of(log p, *other log-probs)`` under p in every row: [..., v] -> [...].

    Computed in at least float32; tokens with an infinite logit in any input are left out.
    """
    compute = torch.promote_types(p_logits.dtype, torch.float32)
    excluded = torch.isinf(p_logits)
    for logits in other_logits:
        excluded = torch.logical_or(excluded, torch.isinf(logits))
    # Masked before and after: 0 · -inf would be NaN, in the product and in its gradient.
    log_probs = []
    for logits in (p_logits, *other_logits):
        log_probs.append(torch.log_softmax(logits, -1, dtype=compute).masked_fill(excluded, 0.0))
    terms = log_probs[0].exp() * of(*log_probs)
    return terms.masked_fill(excluded, 0.0).sum(-1)


def forward_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Compute KL(teacher‖student) of every position: [..., v] -> [...]."""
    return _expectation(teacher_logits, student_logits, of=lambda log_p, log_q: log_p - log_q)


def forward_cross_entropy(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Compute KL(teacher‖student) plus the teacher's entropy, a constant: [..., v] -> [...]."""
    return _expectation(teacher_logits, student_logits, of=lambda log_p, log_q: -log_q)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Compute KL(student‖teacher) of every position: [..., v] -> [...]."""
    return _expectation(student_logits, teacher_logits, of=lambda log_p, log_q: log_p - log_q)


def jensen_shannon(student_logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """Compute the generalized Jensen-Shannon divergence of every position: [..., v] -> [...].

    β KL(teacher‖m) + (1 − β) KL(student‖m), m = β teacher + (1 − β) student, 0 < β < 1 (Agarwal et al., "On-Policy
    Distillation of Language Models", 2024, equation 1).
    """

    def against_mixture(share: float) -> Callable[[Tensor, Tensor], Tensor]:
        """log p - log m, for m = share · p + (1 - share) · q."""
        log_share_p = math.log(share)
        log_share_q = math.log1p(-share)
        return lambda log_p, log_q: log_p - torch.logaddexp(log_p + log_share_p, log_q + log_share_q)

    of_teacher = _expectation(teacher_logits, student_logits, of=against_mixture(beta))
    of_student = _expectation(student_logits, teacher_logits, of=against_mixture(1.0 - beta))
    return beta * of_teacher + (1.0 - beta) * of_student


def _check_fraction(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}: give a number from 0 to 1.")
    return value


class DivergenceLoss(nn.Module, ABC):
    """Base class of distillation losses: mean divergence over labeled tokens.

    A subclass defines :meth:`divergence`; recipes call :meth:`distill`.

    Args:
        ignore_index: label of ignored tokens.
        temperature: divisor of the logits of both models; gradients are not multiplied by its square.
        top_k: compare the teacher's ``top_k`` likeliest tokens, and all other tokens as one bucket; ``None`` compares
            every token.

    Raises:
        ValueError: ``temperature`` is not above 0, or ``top_k`` is below 1.

    Example:
        >>> from torchtune.modules.loss import DivergenceLoss, ForwardKLLoss
        >>> issubclass(ForwardKLLoss, DivergenceLoss)
        True
    """

    num_output_chunks = 1

    def __init__(self, ignore_index: int = -100, *, temperature: float = 1.0, top_k: int | None = None) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}: it must be above 0.")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}: it must be at least 1, or null for all tokens.")
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.top_k = top_k

    @abstractmethod
    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute the divergence of every position: [..., v] -> [...]."""

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the divergence of one chunk (arguments of ``torch.compile``); return the loss itself."""
        self.divergence = torch.compile(self.divergence, *args, **kwargs)
        return self

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, normalize: bool = True) -> Tensor:
        """Compute the mean over labeled tokens (0 if there are none), or their sum.

        Args:
            student_logits: [b, s, v] or [n, v].
            teacher_logits: same shape as ``student_logits``.
            labels: [b, s] or [n]; only whether they equal ``ignore_index`` matters.
            normalize: divide by the number of labeled tokens.

        Returns:
            Scalar, float32 (float64 for float64 logits).
        """
        total, count = self.sum_and_count(student_logits, teacher_logits, labels)
        if not normalize:
            return total
        return total / count.clamp(min=1)

    def sum_and_count(self, student_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the divergence summed over labeled tokens (scalar), and their number (int64 scalar)."""
        is_labeled = labels != self.ignore_index
        divergences = self._rows(student_logits, teacher_logits).masked_fill(~is_labeled, 0.0)
        return divergences.sum(), is_labeled.sum()

    @outside_graphs
    def distill(
        self,
        hidden: Tensor,
        labels: Tensor,
        projection: Projection,
        teacher: TeacherOutputs,
        *,
        index: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute :meth:`sum_and_count` from hidden states, without materializing all logits of either model.

        Logits are computed only for labeled tokens, chunk by chunk. If the vocabularies differ in size (embeddings
        padded to different multiples), the distributions are normalized over the tokens that both have.

        Args:
            hidden: result of ``student(..., output="hidden")`` [b, s, d].
            labels: int64 [b, s]; only whether they equal ``ignore_index`` matters.
            projection: ``student.output``.
            teacher: outputs of the teacher, for example :class:`TeacherStates`.
            index: int64 [n], positions of the labeled tokens in the flattened batch; by default they are looked for.
            weights: float32 [b, s], factors of the divergences of single tokens; None: each is 1.

        Returns:
            Sum (scalar, at least float32; differentiable once) and count of labels (int64 scalar), or sum of their
            weights (float32 scalar).
        """
        if index is None:
            index = label_index(labels, self.ignore_index)
        vocab_size = min(len(projection.weight), teacher.vocab_size)
        teacher = teacher.select(index, vocab_size)
        label_weights = None
        if weights is not None:
            label_weights = weights.flatten()[index]  # [n]
        labeled = hidden.flatten(0, -2)[index]  # [n, d]
        chunked = ChunkedSum(labeled, Logits.of(projection))
        # Without labels one empty chunk, so that this rank runs the collectives of the other ranks.
        for rows in chunk_slices(len(index), self._chunk_rows(len(index), vocab_size)):
            divergences, gradients = self._distill_chunk(chunked, rows, teacher, vocab_size, label_weights)
            chunked.add(rows, divergences, gradients)
            del gradients  # one is of the output weight: before the next chunk allocates its own
        if label_weights is not None:
            return chunked.total(), label_weights.sum()
        count = torch.full((), len(index), device=labels.device)
        return chunked.total(), count

    def _distill_chunk(
        self, chunked: ChunkedSum, rows: slice, teacher: TeacherOutputs, vocab_size: int, weights: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the weighted divergences [n] of a chunk, and its gradients; on return, its logits are freed."""
        # Likeliest tokens have been chosen and divided by the temperature already.
        divergence = self.divergence if teacher.are_likeliest else self._rows
        chunk_hidden = chunked.chunk_hidden(rows)  # [n, d]
        with kept_on_device():
            logits = chunked.logits(chunk_hidden)  # [n, v]; with tensor parallelism, this rank's shard
            student_logits = chunked.logits.gather_columns(logits, vocab_size)
            divergences = divergence(*teacher.pair(student_logits, rows))  # [n]
            if weights is not None:
                divergences = divergences * weights[rows]
            gradients = chunked.chunk_gradients(chunk_hidden, divergences)
        return divergences.detach(), gradients

    def _chunk_rows(self, count: int, vocab_size: int) -> int:
        """Positions per chunk of ``count`` positions, so that a chunk's logits fit in ``_CHUNK_ELEMENTS``."""
        even = -(-count // self.num_output_chunks)  # rounded up
        largest = max(1, _CHUNK_ELEMENTS // vocab_size)
        return min(max(_MIN_CHUNK_ROWS, even), largest)

    @torch.no_grad()
    def likeliest(self, labels: Tensor, teacher: TeacherStates, vocab_size: int) -> LikeliestTokens:
        """Return the teacher's likeliest tokens at the labeled positions, for a loss with :attr:`top_k`.

        Args:
            labels: int64 [b, s].
            teacher: the teacher's hidden states at these positions.
            vocab_size: number of tokens that teacher and student both have.
        """
        index = label_index(labels, self.ignore_index)
        teacher = teacher.select(index, vocab_size)
        chunk_rows = self._chunk_rows(len(index), vocab_size)
        chunks_of_tokens = []
        chunks_of_log_probs = []
        for rows in chunk_slices(len(index), chunk_rows):
            # No name for the logits [n, v]: it would keep them while the next chunk's are computed.
            likeliest = LikeliestTokens.of(teacher.logits(rows), self.top_k, self.temperature)
            tokens, log_probs = likeliest.arrays()
            chunks_of_tokens.append(tokens)  # [n, k]
            chunks_of_log_probs.append(log_probs)  # [n, k + 1]
        return LikeliestTokens(
            torch.cat(chunks_of_tokens), torch.cat(chunks_of_log_probs), vocab_size, self.temperature
        )

    def _rows(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Divergences of every position with :attr:`temperature` and :attr:`top_k`: [..., v] -> [...]."""
        if self.top_k is not None:
            teacher = LikeliestTokens.of(teacher_logits.flatten(0, -2), self.top_k, self.temperature)
            log_probs = teacher.pair(student_logits.flatten(0, -2), slice(None))  # of both, [n, k + 1]
            divergences = self.divergence(*log_probs)  # [n]
            return divergences.view(student_logits.shape[:-1])
        if self.temperature != 1.0:
            student_logits = student_logits / self.temperature
            teacher_logits = teacher_logits / self.temperature
        return self.divergence(student_logits, teacher_logits)


class ForwardKLLoss(DivergenceLoss):
    """Mean of KL(teacher‖student) over labeled tokens; mode-covering (Hinton et al. 2015, arXiv:1503.02531).

    By default the loss is the cross entropy −Σ p log q: the gradient is that of the KL divergence, and the minimum is
    the teacher's entropy instead of 0.

    Args:
        ignore_index: label of ignored tokens.
        with_entropy: subtract the teacher's entropy, which gives the KL divergence.
        temperature: divisor of the logits of both models; gradients are not multiplied by its square.
        top_k: see :class:`DivergenceLoss`.

    Example:
        >>> from torchtune.modules.loss import ForwardKLLoss
        >>> logits = torch.randn(1, 3, 8)
        >>> loss = ForwardKLLoss()
        >>> loss(logits, logits, torch.tensor([[1, 2, -100]])).abs().item() < 10
        True
    """

    def __init__(
        self,
        ignore_index: int = -100,
        *,
        with_entropy: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> None:
        super().__init__(ignore_index, temperature=temperature, top_k=top_k)
        self.with_entropy = with_entropy

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute KL(teacher‖student), or the cross entropy, of every position."""
        forward_divergence = forward_kl if self.with_entropy else forward_cross_entropy
        return forward_divergence(student_logits, teacher_logits)


class ReverseKLLoss(DivergenceLoss):
    """Mean of KL(student‖teacher) over labeled tokens; mode-seeking (Gu et al., "MiniLLM", 2024).

    Args:
        ignore_index: label of ignored tokens.
        temperature: divisor of the logits of both models; gradients are not multiplied by its square.
        top_k: see :class:`DivergenceLoss`.

    Example:
        >>> from torchtune.modules.loss import ReverseKLLoss
        >>> logits, labels = torch.randn(1, 3, 8), torch.tensor([[1, 2, -100]])
        >>> round(ReverseKLLoss()(logits, logits, labels).item(), 5)
        0.0
    """

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute KL(student‖teacher) of every position."""
        return reverse_kl(student_logits, teacher_logits)


class SymmetricKLLoss(DivergenceLoss):
    """Weighted sum of forward and reverse KL.

    Args:
        sym_kd_ratio: weight of the forward KL; the reverse KL has the weight ``1 - sym_kd_ratio``.
        ignore_index: label of ignored tokens.
        with_entropy: as in :class:`ForwardKLLoss`.
        temperature: divisor of the logits of both models; gradients are not multiplied by its square.
        top_k: see :class:`DivergenceLoss`.

    Raises:
        ValueError: ``sym_kd_ratio`` is outside [0, 1], ``temperature`` is not above 0, or ``top_k`` is below 1.

    Example:
        >>> from torchtune.modules.loss import SymmetricKLLoss
        >>> logits, labels = torch.randn(1, 3, 8), torch.tensor([[1, 2, -100]])
        >>> SymmetricKLLoss(sym_kd_ratio=0.5)(logits, logits, labels).shape
        torch.Size([])
    """

    def __init__(
        self,
        sym_kd_ratio: float = 0.5,
        ignore_index: int = -100,
        *,
        with_entropy: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> None:
        super().__init__(ignore_index, temperature=temperature, top_k=top_k)
        self.sym_kd_ratio = _check_fraction("sym_kd_ratio", sym_kd_ratio)
        self.with_entropy = with_entropy

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute the weighted sum of both divergences of every position."""
        forward_divergence = forward_kl if self.with_entropy else forward_cross_entropy
        forward = forward_divergence(student_logits, teacher_logits)
        reverse = reverse_kl(student_logits, teacher_logits)
        return self.sym_kd_ratio * forward + (1.0 - self.sym_kd_ratio) * reverse


class GeneralizedJSDLoss(DivergenceLoss):
    """Mean of the generalized Jensen-Shannon divergence over labeled tokens.

    It is β KL(teacher‖m) + (1 − β) KL(student‖m) with m = β teacher + (1 − β) student; bounded, unlike both KL
    divergences. By definition it is KL(teacher‖student) at β = 0 and KL(student‖teacher) at β = 1 (Agarwal et al.,
    "On-Policy Distillation of Language Models", 2024).

    Args:
        beta: β, weight of the teacher in the mixture, from 0 to 1.
        num_output_chunks: see :class:`ForwardKLWithChunkedOutputLoss`.
        ignore_index: label of ignored tokens.
        temperature: divisor of the logits of both models; gradients are not multiplied by its square.
        top_k: see :class:`DivergenceLoss`.

    Raises:
        ValueError: ``beta`` is outside [0, 1], ``temperature`` is not above 0, or ``num_output_chunks`` or
            ``top_k`` is below 1.

    Example:
        >>> from torchtune.modules.loss import GeneralizedJSDLoss
        >>> logits, labels = torch.randn(1, 3, 8), torch.tensor([[1, 2, -100]])
        >>> abs(round(GeneralizedJSDLoss(beta=0.5)(logits, logits, labels).item(), 5))
        0.0
    """

    def __init__(
        self,
        beta: float = 0.5,
        num_output_chunks: int = 8,
        ignore_index: int = -100,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> None:
        super().__init__(ignore_index, temperature=temperature, top_k=top_k)
        self.beta = _check_fraction("beta", beta)
        self.num_output_chunks = _check_chunks(num_output_chunks)

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute the generalized Jensen-Shannon divergence of every position."""
        if self.beta == 0.0:
            return forward_kl(student_logits, teacher_logits)
        if self.beta == 1.0:
            return reverse_kl(student_logits, teacher_logits)
        return jensen_shannon(student_logits, teacher_logits, self.beta)


def _check_chunks(number: int) -> int:
    if number < 1:
        raise ValueError(f"num_output_chunks is {number}: it must be at least 1.")
    return number


class _ChunkedLoss(nn.Module):
    """Mean divergence over labeled tokens, from logits in chunks along the sequence, or from hidden states."""

    def __init__(self, num_output_chunks: int, loss: DivergenceLoss) -> None:
        super().__init__()
        self.num_output_chunks = loss.num_output_chunks = _check_chunks(num_output_chunks)
        self.ignore_index = loss.ignore_index
        self.distill = loss.distill
        self.likeliest = loss.likeliest
        self.temperature = loss.temperature
        self.top_k = loss.top_k
        self._loss = loss

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the divergence of one chunk (arguments of ``torch.compile``); return the loss itself."""
        self._loss.apply_compile_strategy(*args, **kwargs)
        return self

    def forward(self, student_logits: Sequence[Tensor], teacher_logits: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Compute the mean over labeled tokens, 0 if there are none.

        Args:
            student_logits: ``num_output_chunks`` tensors [b, s / chunks, v].
            teacher_logits: tensors of the same shapes.
            labels: [b, s].

        Returns:
            Scalar, float32 (float64 for float64 logits).

        Raises:
            ValueError: the chunks do not match the labels or each other.
        """
        total, count = self.sum_and_count(student_logits, teacher_logits, labels)
        return total / count.clamp(min=1)

    def sum_and_count(
        self, student_logits: Sequence[Tensor], teacher_logits: Sequence[Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the summed divergence (scalar) and the number of labeled tokens (int64); see :meth:`forward`."""
        lengths = [chunk.shape[1] for chunk in student_logits]
        if sum(lengths) != labels.shape[1] or len(lengths) != len(teacher_logits):
            raise ValueError(
                f"{len(lengths)} chunks of student logits cover {sum(lengths)} positions and there are "
                f"{len(teacher_logits)} chunks of teacher logits, but labels have {labels.shape[1]} positions: "
                "give both logits in the same chunks along the sequence."
            )
        chunks = zip(student_logits, teacher_logits, labels.split(lengths, dim=1), strict=True)
        total: Tensor | int = 0
        for student_chunk, teacher_chunk, label_chunk in chunks:
            total = total + self._loss(student_chunk, teacher_chunk, label_chunk, normalize=False)
        count = (labels != self.ignore_index).sum()
        return total, count


class ForwardKLWithChunkedOutputLoss(_ChunkedLoss):
    """:class:`ForwardKLLoss` in chunks, which avoids float32 copies of all logits.

    Args:
        num_output_chunks: number of chunks; for hidden states more if logits would need much memory, and fewer if
            chunks would be too small.
        ignore_index: label of ignored tokens.
        options: further arguments of :class:`ForwardKLLoss`.

    Example:
        >>> from torchtune.modules.loss import ForwardKLWithChunkedOutputLoss
        >>> chunks, labels = [torch.randn(1, 2, 8), torch.randn(1, 2, 8)], torch.tensor([[1, 2, 3, -100]])
        >>> ForwardKLWithChunkedOutputLoss(num_output_chunks=2)(chunks, chunks, labels).shape
        torch.Size([])
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100, **options: Any) -> None:
        super().__init__(num_output_chunks, ForwardKLLoss(ignore_index, **options))


class ReverseKLWithChunkedOutputLoss(_ChunkedLoss):
    """:class:`ReverseKLLoss` in chunks.

    Args:
        num_output_chunks: see :class:`ForwardKLWithChunkedOutputLoss`.
        ignore_index: label of ignored tokens.
        options: further arguments of :class:`ReverseKLLoss`.

    Example:
        >>> from torchtune.modules.loss import ReverseKLWithChunkedOutputLoss
        >>> chunks, labels = [torch.randn(1, 2, 8), torch.randn(1, 2, 8)], torch.tensor([[1, 2, 3, -100]])
        >>> loss = ReverseKLWithChunkedOutputLoss(num_output_chunks=2)
        >>> abs(round(loss(chunks, chunks, labels).item(), 5))
        0.0
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100, **options: Any) -> None:
        super().__init__(num_output_chunks, ReverseKLLoss(ignore_index, **options))


class SymmetricKLWithChunkedOutputLoss(_ChunkedLoss):
    """:class:`SymmetricKLLoss` in chunks.

    Args:
        num_output_chunks: see :class:`ForwardKLWithChunkedOutputLoss`.
        sym_kd_ratio: weight of the forward KL.
        ignore_index: label of ignored tokens.
        options: further arguments of :class:`SymmetricKLLoss`.

    Example:
        >>> from torchtune.modules.loss import SymmetricKLWithChunkedOutputLoss
        >>> chunks, labels = [torch.randn(1, 2, 8), torch.randn(1, 2, 8)], torch.tensor([[1, 2, 3, -100]])
        >>> SymmetricKLWithChunkedOutputLoss(num_output_chunks=2)(chunks, chunks, labels).shape
        torch.Size([])
    """

    def __init__(
        self, num_output_chunks: int = 8, sym_kd_ratio: float = 0.5, ignore_index: int = -100, **options: Any
    ) -> None:
        super().__init__(num_output_chunks, SymmetricKLLoss(sym_kd_ratio, ignore_index, **options))
        self.sym_kd_ratio = sym_kd_ratio
