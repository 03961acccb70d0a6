"""Cross entropy over the labeled tokens of a batch."""

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
from torchtune.modules.loss._row_losses import record_row_losses
from torchtune.modules.loss._split_vocabulary import split_cross_entropy_sum
from torchtune.modules.loss.loss_types import SFTLoss
from torchtune.utils import get_logger, log_once

# Smaller chunks make the products slow and save little memory. The gradient of a trained weight takes more memory than
# the logits of 512 positions.
_MIN_CHUNK_ROWS = 256
_MIN_CHUNK_ROWS_TRAINED = 512


def choose_chunk_rows(rows: int, num_output_chunks: int, trained: Tensor | None) -> int:
    """Return the positions per chunk; ``trained`` [v, d] is the output weight if it gets a gradient."""
    even = -(-rows // num_output_chunks)
    if trained is None:
        return max(_MIN_CHUNK_ROWS, even)
    if trained.dtype.itemsize < 4 and rows <= 2 * trained.shape[1]:
        return rows  # one chunk: less memory than a float32 sum of the weight's gradient
    return max(_MIN_CHUNK_ROWS_TRAINED, even)


class LinearCrossEntropyLoss(SFTLoss, nn.Module):
    """Chunked cross entropy over labeled tokens, from hidden states and the output projection.

    Recipes call :meth:`sum_and_count`. :meth:`forward`, the mean, is for callers that set the projection with
    :meth:`set_model_output`.

    Logits are computed only for labeled tokens, chunk by chunk. Softmax and its gradient are computed in float32
    (float64 for float64 weights), matrix products in the dtype of the weights. With a plain projection, the forward
    pass computes the gradients; any other projection (an adapter, a bias, a soft cap) is recomputed in the backward
    pass.

    Args:
        num_output_chunks: maximum number of chunks; a chunk has at least 256 positions, 512 with a trained projection.
        ignore_index: label of ignored tokens.
        tp_enabled: whether the output projection is sharded over a tensor-parallel group.
        mask_ignored_tokens: skip ignored tokens before the projection; ``False`` keeps shapes fixed.

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
        # In a tuple, so that the projection does not become a submodule.
        self._projection: tuple[Any, ...] = ()
        self._without_gradient = row_losses
        self._with_gradient = row_losses_and_gradient

    @property
    def tp_requires_loss_parallel_ctx_manager(self) -> bool:
        """Always False: this loss supports a sharded weight without ``loss_parallel()``."""
        return False

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> "LinearCrossEntropyLoss":
        """Compile the passes over a chunk's logits, but not the products and the loop over chunks."""
        self._without_gradient = torch.compile(row_losses, *args, **kwargs)
        self._with_gradient = torch.compile(row_losses_and_gradient, *args, **kwargs)
        return self

    def set_model_output(self, model: nn.Module) -> None:
        """Use the output projection of ``model``, and set the model's ``skip_output_layer``.

        For older recipes, which call ``loss(model(tokens), labels)``.
        """
        super().set_model_output(model)
        model.skip_output_layer = True
        self._projection = (model.output,)

    @property
    def linear_projection(self) -> Any:
        """The output projection of ``set_model_output``, or ``None`` before that call."""
        return self._projection[0] if self._projection else None

    def compute_cross_entropy(
        self, hidden_chunk: Tensor, target_chunk: Tensor, projection: Projection | None = None
    ) -> Tensor:
        """Compute the summed cross entropy of some positions: hidden [n, d], targets [n] -> scalar."""
        logits = (projection or self.linear_projection)(hidden_chunk)
        losses = record_row_losses(self._without_gradient(logits, target_chunk.clamp(min=0)))
        return losses.masked_fill(target_chunk == self.ignore_index, 0.0).sum()

    def mask_inputs(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Select labeled tokens: hidden [n, d], target [n] -> [m, d], [m]."""
        index = (target != self.ignore_index).nonzero().squeeze(1)
        if len(index) == len(target):
            return hidden, target
        return hidden.index_select(0, index), target.index_select(0, index)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss over labeled tokens, or 0 with zero gradients if there are none.

        Args:
            outputs: hidden states [b, s, d].
            targets: labels int64 [b, s], already shifted.

        Returns:
            Scalar, float32 (float64 for float64 inputs).

        Raises:
            AttributeError: ``set_model_output(model)`` has not been called.
        """
        if not self._projection:
            raise AttributeError("LinearCrossEntropyLoss: call set_model_output(model) before the first loss.")
        total, count = self.sum_and_count(outputs, targets, self.linear_projection)
        return total / count.clamp(min=1)

    def sum_and_count(self, hidden: Tensor, labels: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """Compute the loss summed over labeled tokens, and their number.

        Args:
            hidden: hidden states [b, s, d].
            labels: int64 [b, s], already shifted.
            projection: [n, d] -> logits [n, v], the ``output`` of the model.

        Returns:
            Sum (scalar, float32, or float64 for float64 inputs; 0 with zero gradients if there is no label) and count
            (int64 scalar).
        """
        count = (labels != self.ignore_index).sum()
        outputs, target = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        rows = outputs
        if self.mask_ignored_tokens:
            rows, target = self.mask_inputs(rows, target)
        weight = plain_weight(projection)
        if len(target) == 0:
            return self._zero_loss(outputs, projection, weight), count
        trained = weight is not None and torch.is_grad_enabled() and weight.requires_grad
        chunk_rows = choose_chunk_rows(len(target), self.num_output_chunks, weight if trained else None)
        if hasattr(weight, "device_mesh"):
            return self._vocab_parallel(rows, weight, target, chunk_rows, getattr(projection, "softcap", None)), count
        if weight is None:
            log_once(get_logger(), "The output projection is not a plain product: its logits are computed twice.")
        if weight is None or not self.mask_ignored_tokens:
            return self._sum_with_recompute(rows, target, projection, chunk_rows), count
        total = linear_cross_entropy_sum(
            rows,
            weight,
            target,
            chunk_rows=chunk_rows,
            without_gradient=self._without_gradient,
            with_gradient=self._with_gradient,
        )
        return total, count

    def _sum_with_recompute(self, hidden: Tensor, target: Tensor, projection: Projection, chunk_rows: int) -> Tensor:
        """Summed loss by calling the projection; the backward pass recomputes the logits."""
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for rows, targets in zip(hidden.split(chunk_rows), target.split(chunk_rows), strict=True):
            if torch.is_grad_enabled():
                total = total + checkpoint(self.compute_cross_entropy, rows, targets, projection, use_reentrant=False)
            else:
                total = total + self.compute_cross_entropy(rows, targets, projection)
        return total

    def _vocab_parallel(
        self, hidden: Tensor, weight: Tensor, target: Tensor, chunk_rows: int, softcap: float | None
    ) -> Tensor:
        """Summed loss with a weight sharded over the vocabulary."""
        if not self.mask_ignored_tokens:
            hidden, target = self.mask_inputs(hidden, target)
        group = weight.device_mesh.get_group()
        return split_cross_entropy_sum(
            hidden, weight.to_local(), target, chunk_rows=chunk_rows, group=group, softcap=softcap
        )

    @staticmethod
    def _zero_loss(outputs: Tensor, projection: Projection, weight: Tensor | None) -> Tensor:
        """Zero with a graph to all parameters, so that every rank runs the same backward pass."""
        if weight is None:
            zero = projection(outputs[:1]).sum() * 0.0
        else:  # without calling the module: FSDP would all-gather it on this rank only
            weight = weight.to_local() if hasattr(weight, "device_mesh") else weight
            zero = nn.functional.linear(outputs[:1], weight).sum() * 0.0
        return (zero + outputs.sum() * 0.0 + 0.0).to(torch.promote_types(outputs.dtype, torch.float32))
