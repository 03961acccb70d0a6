"""Cross entropy over the labelled positions of a batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtune.modules.loss._linear_cross_entropy import (
    linear_cross_entropy_sum,
    row_losses,
    row_losses_and_gradient,
)
from torchtune.modules.loss._projection import Projection, plain_weight
from torchtune.modules.loss._rows import seen
from torchtune.modules.loss._split_vocabulary import split_cross_entropy_sum
from torchtune.modules.loss.loss_types import SFTLoss
from torchtune.utils import get_logger, log_once

# Fewer positions per chunk make the products slow and save little memory; where the weight is trained, its gradient
# is held anyway and is larger than the logits of so many positions.
_MIN_CHUNK_ROWS = 256
_MIN_CHUNK_ROWS_TRAINED = 512


def rows_of_a_chunk(rows: int, num_output_chunks: int, trained: Tensor | None) -> int:
    """Positions per chunk, where ``trained`` [v, d] is the weight of the output if it gets a gradient."""
    even = -(-rows // num_output_chunks)
    if trained is None:
        return max(_MIN_CHUNK_ROWS, even)
    if trained.dtype.itemsize < 4 and rows <= 2 * trained.shape[1]:
        return rows  # these logits take less memory than summing the weight's gradient in float32 would
    return max(_MIN_CHUNK_ROWS_TRAINED, even)


class LinearCrossEntropyLoss(SFTLoss, nn.Module):
    """Cross entropy over labelled positions, of hidden states and the output projection that makes logits of them.

    :meth:`sum_and_count` is what recipes call. :meth:`forward`, the mean, is for callers that have told the loss their
    projection with :meth:`set_model_output`.

    The output projection is evaluated only where there is a label, for a chunk of positions at a time, so that full
    logits never exist. Softmax and its gradient are computed in float32 (float64 for float64 weights), products in
    the dtype of the weights. With a plain projection the gradients are made in the forward pass; a projection that
    is anything else (an adapter, a bias, a soft cap) is recomputed in the backward pass.

    Args:
        num_output_chunks: number of chunks; there are fewer where chunks would be so small (256 positions, 512 with
            a trained projection) that they cost time and save nothing.
        ignore_index: label of positions without a label.
        tp_enabled: whether the output projection is split over a tensor-parallel group.
        mask_ignored_tokens: skip positions without a label before the projection; ``False`` keeps shapes fixed.

    Example:
        >>> from torchtune.modules.loss import LinearCrossEntropyLoss
        >>> loss, hidden = LinearCrossEntropyLoss(), torch.zeros(1, 3, 8)
        >>> projection = torch.nn.Linear(8, 4, bias=False)
        >>> total, count = loss.sum_and_count(hidden, torch.tensor([[2, -100, 1]]), projection)
        >>> round(total.item(), 4), count.item()  # 2 log(4)
        (2.7726, 2)
    """

    def __init__(
        self,
        num_output_chunks: int = 8,
        ignore_index: int = -100,
        tp_enabled: bool = False,
        mask_ignored_tokens: bool = True,
    ) -> None:
        super().__init__()
        if num_output_chunks < 1:
            raise ValueError(f"num_output_chunks is {num_output_chunks}: it must be at least 1.")
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index
        self.tp_enabled = tp_enabled
        self.mask_ignored_tokens = mask_ignored_tokens
        # In a tuple, so that the projection is no submodule: its parameters belong to the model.
        self._projection: tuple[Any, ...] = ()
        self._without_gradient = row_losses
        self._with_gradient = row_losses_and_gradient

    @property
    def tp_requires_loss_parallel_ctx_manager(self) -> bool:
        """Whether tensor parallelism must run this loss inside ``loss_parallel()``; it reads a split weight itself."""
        return False

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> "LinearCrossEntropyLoss":
        """Compile the passes over a chunk's logits; products and the loop over chunks stay as they are."""
        self._without_gradient = torch.compile(row_losses, *args, **kwargs)
        self._with_gradient = torch.compile(row_losses_and_gradient, *args, **kwargs)
        return self

    def set_model_output(self, model: nn.Module) -> None:
        """Remember the output projection of ``model``, and set its ``skip_output_layer``.

        For older recipes, which then call ``loss(model(tokens), labels)``.
        """
        super().set_model_output(model)
        model.skip_output_layer = True
        self._projection = (model.output,)

    @property
    def linear_projection(self) -> Any:
        """The output projection that ``set_model_output`` found; ``None`` before."""
        return self._projection[0] if self._projection else None

    def compute_cross_entropy(
        self, hidden_chunk: Tensor, target_chunk: Tensor, projection: Projection | None = None
    ) -> Tensor:
        """Summed cross entropy of some positions: hidden [n, d], targets [n] -> scalar."""
        logits = (projection or self.linear_projection)(hidden_chunk)
        losses = seen(self._without_gradient(logits, target_chunk.clamp(min=0)))
        return losses.masked_fill(target_chunk == self.ignore_index, 0.0).sum()

    def mask_inputs(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Positions with a label: hidden [n, d], target [n] -> [m, d], [m]."""
        index = (target != self.ignore_index).nonzero().squeeze(1)
        if len(index) == len(target):
            return hidden, target
        return hidden.index_select(0, index), target.index_select(0, index)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over positions with a label, 0 (with zero gradients) where there is none.

        Args:
            outputs: hidden states [b, s, d].
            targets: labels int64 [b, s], already shifted.

        Returns:
            scalar, float32 (float64 for float64 inputs).

        Raises:
            AttributeError: ``set_model_output(model)`` has not been called.
        """
        if not self._projection:
            raise AttributeError("LinearCrossEntropyLoss: call set_model_output(model) before the first loss.")
        total, count = self.sum_and_count(outputs, targets, self.linear_projection)
        return total / count.clamp(min=1)

    def sum_and_count(self, hidden: Tensor, labels: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """Loss summed over positions with a label, and the number of these positions.

        Args:
            hidden: hidden states [b, s, d].
            labels: int64 [b, s], already shifted.
            projection: [n, d] -> logits [n, v], the ``output`` of the model.

        Returns:
            sum (scalar, float32, or float64 for float64 inputs; 0 with zero gradients where no position has a label)
            and count (int64 scalar).
        """
        count = (labels != self.ignore_index).sum()
        outputs, target = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        rows = outputs
        if self.mask_ignored_tokens:
            rows, target = self.mask_inputs(rows, target)
        weight = plain_weight(projection)
        if len(target) == 0:
            return self._no_label(outputs, projection, weight), count
        trained = weight is not None and torch.is_grad_enabled() and weight.requires_grad
        chunk_rows = rows_of_a_chunk(len(target), self.num_output_chunks, weight if trained else None)
        if hasattr(weight, "device_mesh"):
            return self._split(rows, weight, target, chunk_rows, getattr(projection, "softcap", None)), count
        if weight is None:
            log_once(get_logger(), "The output projection is not a plain product: its logits are computed twice.")
        if weight is None or not self.mask_ignored_tokens:
            return self._recomputed(rows, target, projection, chunk_rows), count
        total = linear_cross_entropy_sum(
            rows,
            weight,
            target,
            chunk_rows=chunk_rows,
            without_gradient=self._without_gradient,
            with_gradient=self._with_gradient,
        )
        return total, count

    def _recomputed(self, hidden: Tensor, target: Tensor, projection: Projection, chunk_rows: int) -> Tensor:
        """The summed loss through the projection itself, whose logits are made again in the backward pass."""
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for rows, targets in zip(hidden.split(chunk_rows), target.split(chunk_rows), strict=True):
            if torch.is_grad_enabled():
                total = total + checkpoint(self.compute_cross_entropy, rows, targets, projection, use_reentrant=False)
            else:
                total = total + self.compute_cross_entropy(rows, targets, projection)
        return total

    def _split(self, hidden: Tensor, weight: Tensor, target: Tensor, chunk_rows: int, softcap: float | None) -> Tensor:
        """The summed loss where each rank of a tensor-parallel group has the weight's rows of some tokens."""
        if not self.mask_ignored_tokens:
            hidden, target = self.mask_inputs(hidden, target)
        group = weight.device_mesh.get_group()
        return split_cross_entropy_sum(
            hidden, weight.to_local(), target, chunk_rows=chunk_rows, group=group, softcap=softcap
        )

    @staticmethod
    def _no_label(outputs: Tensor, projection: Projection, weight: Tensor | None) -> Tensor:
        """Zero, connected to everything that a loss would be connected to: outputs [n, d] -> scalar."""
        if weight is None:
            zero = projection(outputs[:1]).sum() * 0.0
        else:  # not through the module: FSDP would gather it on this rank alone
            weight = weight.to_local() if hasattr(weight, "device_mesh") else weight
            zero = nn.functional.linear(outputs[:1], weight).sum() * 0.0
        return (zero + outputs.sum() * 0.0 + 0.0).to(torch.promote_types(outputs.dtype, torch.float32))
