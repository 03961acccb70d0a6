"""Cross entropy over the labeled tokens of a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtune.data import label_index
from torchtune.modules.loss._chunked_logits import Logits, Projection, chunked_sum
from torchtune.modules.loss._log_probs import log_probs_of_rows
from torchtune.modules.loss.loss_types import SFTLoss, record_row_losses
from torchtune.utils import computes_on_cpu

# Smaller chunks make the products slow and save little memory. The gradient of a trained weight takes more memory than
# the logits of 512 positions.
_MIN_CHUNK_ROWS = 256
_MIN_CHUNK_ROWS_TRAINED = 512

# Number of logits per softmax block; on CPU small enough to stay in cache.
_CPU_BLOCK = 2**20
LOGITS_BLOCK = 2**26

# (logits, target) -> losses of rows; overwrites the logits with their gradient.
RowLosses = Callable[[Tensor, Tensor], Tensor]


def row_losses(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the cross entropy of every row [n], and overwrite ``logits`` [n, v] with its gradient, softmax − one-hot.

    The largest probability is 1 / Σ exp(logit − largest logit), which gives the normalizer without another pass.
    """
    compute = torch.promote_types(logits.dtype, torch.float32)
    column = target.unsqueeze(-1)
    margins = logits.amax(-1).to(compute) - logits.gather(-1, column).squeeze(-1)
    gradient = torch.softmax(logits, -1, dtype=compute)
    losses = margins - gradient.amax(-1).log_()
    gradient.scatter_add_(-1, column, torch.full_like(column, -1, dtype=compute))
    logits.copy_(gradient)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, function: RowLosses) -> Tensor:
        block = _CPU_BLOCK if computes_on_cpu(logits.device) else LOGITS_BLOCK
        rows = max(1, block // logits.shape[1])
        # Detached: the compiler refuses views that were made without gradients of a tensor that has one, once another
        # view has changed it in place.
        values = logits.detach()
        losses = [
            function(block_logits, block_target)
            for block_logits, block_target in zip(values.split(rows), target.split(rows), strict=True)
        ]
        ctx.gradient = logits  # overwritten by the function
        ctx.rows = rows
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        factors = grad.unsqueeze(-1)
        if not computes_on_cpu(grad.device):
            return ctx.gradient.mul_(factors), None, None
        # On a CPU, torch multiplies bfloat16 by float32 in 15 times the time that it takes with a cast of small blocks.
        for block, factor in zip(ctx.gradient.split(ctx.rows), factors.split(ctx.rows), strict=True):
            block.copy_(block.to(factor.dtype).mul_(factor))
        return ctx.gradient, None, None


def cross_entropy(logits: Tensor, target: Tensor, function: RowLosses = row_losses) -> Tensor:
    """Compute the cross entropy of every row, at least float32 [n], without another tensor of the logits' size.

    Args:
        logits: [n, v], overwritten with their gradient.
        target: int64 [n].
        function: :func:`row_losses`, or this function compiled.
    """
    return _CrossEntropy.apply(logits, target, function)


def choose_chunk_rows(rows: int, num_output_chunks: int, trained: Tensor | None) -> int:
    """Return the positions per chunk; ``trained`` [v, d] is the output weight if it gets a gradient."""
    even = -(-rows // num_output_chunks)  # rounded up
    if trained is None:
        return max(_MIN_CHUNK_ROWS, even)
    if trained.dtype.itemsize < 4 and 0 < rows <= 2 * trained.shape[1]:
        return rows  # one chunk: less memory than a float32 sum of the weight's gradient
    return max(_MIN_CHUNK_ROWS_TRAINED, even)


class LinearCrossEntropyLoss(SFTLoss, nn.Module):
    """Chunked cross entropy over labeled tokens, from hidden states and the output projection.

    Recipes call :meth:`sum_and_count`. :meth:`forward`, the mean, is for callers that set the projection with
    :meth:`set_model_output`.

    Logits are computed only for labeled tokens, chunk by chunk. Softmax and its gradient are computed in float32
    (float64 for float64 weights), matrix products in the dtype of the weights. The forward pass computes the gradients.

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
        self._row_losses = row_losses

    @property
    def tp_requires_loss_parallel_ctx_manager(self) -> bool:
        """Always False: this loss supports a sharded weight without ``loss_parallel()``."""
        return False

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> "LinearCrossEntropyLoss":
        """Compile the passes over a chunk's logits, but not the products and the loop over chunks."""
        self._row_losses = torch.compile(row_losses, *args, **kwargs)
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

    def compute_cross_entropy(self, hidden_chunk: Tensor, target_chunk: Tensor) -> Tensor:
        """Compute the summed cross entropy of some positions: hidden [n, d], targets [n] -> scalar."""
        logits = Logits.of(self.linear_projection)
        return self._losses_with_ignored(logits(hidden_chunk), target_chunk, logits).sum()

    def _losses(self, logits: Tensor, target: Tensor, projection: Logits) -> Tensor:
        """Cross entropies [n] of logits [n, v], which are overwritten, with a known target [n] in each row."""
        if projection.group is None:
            losses = cross_entropy(logits, target, self._row_losses)
        else:
            losses = -log_probs_of_rows(logits, target, projection.group)[0]
        return record_row_losses(losses)

    def _losses_with_ignored(self, logits: Tensor, target: Tensor, projection: Logits) -> Tensor:
        """As :meth:`_losses`; 0 for ignored tokens."""
        is_ignored = target == self.ignore_index
        losses = self._losses(logits, target.masked_fill(is_ignored, 0), projection)
        return losses.masked_fill(is_ignored, 0.0)

    def mask_inputs(self, hidden: Tensor, target: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Select labeled tokens: hidden [n, d], target [n] -> [m, d], [m]; ``index`` [m] are their positions."""
        if index is None:
            index = label_index(target, self.ignore_index)
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

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, *, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss summed over labeled tokens, and their number.

        Args:
            hidden: hidden states [b, s, d].
            labels: int64 [b, s], already shifted.
            projection: [n, d] -> logits [n, v], the ``output`` of the model.
            index: int64 [m], positions of the labeled tokens in the flattened batch. Without them, the host waits for
                the device to find their number.

        Returns:
            Sum (scalar, float32, or float64 for float64 inputs; 0 with zero gradients if there is no label) and count
            (int64 scalar).
        """
        count = (labels != self.ignore_index).sum()
        hidden = hidden.flatten(0, -2)  # [b * s, d]
        target = labels.flatten()  # [b * s]
        if self.mask_ignored_tokens:
            hidden, target = self.mask_inputs(hidden, target, index)  # [m, d], [m]
            chunk_losses = self._losses
        else:
            chunk_losses = self._losses_with_ignored
        logits = Logits.of(projection)

        def losses(chunk: Tensor, rows: slice) -> Tensor:
            return chunk_losses(chunk, target[rows], logits)

        trained = projection.weight if logits.is_plain and logits.parameters else None
        chunk_rows = choose_chunk_rows(len(target), self.num_output_chunks, trained)
        total = chunked_sum(hidden, losses, logits, chunk_rows)
        return total, count
