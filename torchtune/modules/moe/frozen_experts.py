"""Experts with frozen matrices: their gradients, with few saved activations and few decoded weights at a time.

A backward pass needs the inputs of the experts, and their outputs of the first matrices, which it can compute again.
Quantized experts are decoded by group of experts, in the forward pass and again in the backward pass, and a group is
done before the next is decoded.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtune.modules.kernels.grouped import RowGroups, grouped_mm, grouped_outer, repeat_by_group, sum_by_group
from torchtune.modules.low_precision.formats import Stored
from torchtune.utils import saved_tensor_hooks

if TYPE_CHECKING:
    from torchtune.modules.moe.experts import GroupedExperts

_OUTPUT_MATRIX = "down_proj"
# Bytes of decoded matrices of a group of experts. With fewer, groups have too few rows to keep a GPU busy.
_BYTES_PER_GROUP = 192 * 2**20


class Selection(NamedTuple):
    """Which experts compute a token, and how their outputs are added.

    Attributes:
        scores: factors of the outputs, ``[t, k]``.
        order: int64 ``[t * k]``, the copies of tokens sorted by expert: copy ``i`` is of token ``i // k``.
    """

    scores: Tensor
    order: Tensor


class Adapter(NamedTuple):
    """Low-rank update ``scaling · x A B`` of a product.

    Attributes:
        a_name: name of ``a``.
        b_name: name of ``b``.
        a: ``[e, i, rank]``.
        b: ``[e, rank, o]``.
        scaling: factor of the update.
    """

    a_name: str
    b_name: str
    a: Tensor
    b: Tensor
    scaling: float


class Bias(NamedTuple):
    """Bias of a product: ``values`` ``[e, o]``, the parameter called ``name``."""

    name: str
    values: Tensor


class _Group(NamedTuple):
    """Consecutive experts and their consecutive rows."""

    experts: slice
    rows: slice


class _Rows:
    """The rows of a group of experts: consecutive rows of ``x``, or copies of tokens in any order.

    Args:
        group: the group.
        counts: rows of each of all experts, int64 ``[e]``.
        scores: scores of the copies ``[t, k]``.
        order: the copies of all experts, int64 ``[t * k]``.
    """

    def __init__(self, group: _Group, counts: Tensor, scores: Tensor | None, order: Tensor | None) -> None:
        self.slice = group.rows
        self.by_expert = RowGroups.of(counts[group.experts])
        self._all_scores = scores
        self._copies: Tensor | None = None
        if order is not None:
            self._copies = order[group.rows]
        self._row_scores: dict[torch.dtype, Tensor] = {}

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows out of ``x``, which has a row for each row, or for each token."""
        if self._copies is None:
            return x[self.slice]
        return x.index_select(0, self._tokens)

    @functools.cached_property
    def _tokens(self) -> Tensor:
        """The token of each row, ``[r]``, if rows are copies of tokens."""
        return self._copies // self._all_scores.shape[1]

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """Write a value of each row to its place among those of all rows."""
        if self._copies is None:
            out[self.slice] = rows
        else:
            out.index_copy_(0, self._copies, rows)

    def scores(self, dtype: torch.dtype) -> Tensor | None:
        """Return the scores of the rows ``[r, 1]``, None if there are none."""
        if self._copies is None:
            return None
        if dtype not in self._row_scores:
            row_scores = self._all_scores.flatten().index_select(0, self._copies)
            self._row_scores[dtype] = row_scores.unsqueeze(1).to(dtype)
        return self._row_scores[dtype]


class _Parameter(NamedTuple):
    """A stacked parameter.

    Attributes:
        name: its name.
        positions: where its tensors are in :attr:`_Weights.tensors`.
        decode: makes the matrices of its tensors; None for a parameter that is one tensor.
    """

    name: str
    positions: slice
    decode: Callable[..., Tensor] | None


class _Weights:
    """Names and decoders of the stacked parameters of experts, whose tensors autograd saves.

    Args:
        weights: the stacked parameters by name.
    """

    def __init__(self, weights: Mapping[str, Tensor | Stored]) -> None:
        self.tensors: list[Tensor] = []
        self._parameters: list[_Parameter] = []
        self.decoded_dtypes: dict[str, torch.dtype] = {}  # name of an encoded parameter -> dtype of its matrices
        for name, weight in weights.items():
            start = len(self.tensors)
            if isinstance(weight, Stored):
                self.decoded_dtypes[name] = weight.dtype
                self.tensors.extend(weight.tensors)
                decode = weight.decode
            else:
                self.tensors.append(weight)
                decode = None
            positions = slice(start, len(self.tensors))
            self._parameters.append(_Parameter(name, positions, decode))

    def of_group(self, tensors: Sequence[Tensor], group: _Group) -> dict[str, Tensor]:
        """Return the parameters of a group's experts by name, decoded.

        Args:
            tensors: the tensors of all parameters.
            group: the group.
        """
        weights = {}
        for name, positions, decode in self._parameters:
            tensors_of_group = [tensor[group.experts] for tensor in tensors[positions]]
            if decode is None:
                (weights[name],) = tensors_of_group
            else:
                weights[name] = decode(*tensors_of_group)
        return weights

    def name_of(self, position: int) -> str:
        """Return the name of the parameter with a tensor at this position of ``tensors``."""
        for name, positions, _ in self._parameters:
            if positions.start <= position < positions.stop:
                return name
        raise IndexError(position)


def row_ends(ends: Tensor, experts_per_group: int, rows: int) -> list[int]:
    """Return where the rows of each group of experts end. Syncs host and device.

    Args:
        ends: where the rows of each expert end, ``[e]``.
        experts_per_group: number of experts of a group; the last may have fewer.
        rows: number of all rows.
    """
    # Of every group but the last, which ends with all rows.
    last_expert_of_groups = slice(experts_per_group - 1, -1, experts_per_group)
    return [*ends[last_expert_of_groups].tolist(), rows]


def _make_groups(experts: "GroupedExperts", weights: _Weights, counts: Tensor, rows: int) -> list[_Group]:
    """Divide the experts such that the decoded matrices of a group stay small."""
    num_experts = len(counts)
    decoded_bytes = 0  # per expert
    for name, (_, inputs, outputs) in experts.matrix_shapes().items():
        if name in weights.decoded_dtypes:
            decoded_bytes += inputs * outputs * weights.decoded_dtypes[name].itemsize
    experts_per_group = num_experts
    if decoded_bytes:
        experts_per_group = max(1, _BYTES_PER_GROUP // decoded_bytes)
    if experts_per_group >= num_experts:
        # The ends of the rows are not asked for, because the host would wait for them.
        return [_Group(experts=slice(0, num_experts), rows=slice(0, rows))]
    groups = []
    start = 0
    for number, end in enumerate(row_ends(RowGroups.of(counts).ends, experts_per_group, rows)):
        first_expert = number * experts_per_group
        end_expert = min(first_expert + experts_per_group, num_experts)
        if end > start:  # matrices of a group without rows are not decoded
            groups.append(_Group(experts=slice(first_expert, end_expert), rows=slice(start, end)))
        start = end
    return groups


class _Call:
    """State of a call of frozen experts, except its tensors.

    Args:
        experts: the experts.
        weights: their parameters.
        groups: groups of experts with rows.
        saves_projected: whether the outputs of the first matrices are saved for the backward pass.
    """

    def __init__(
        self, experts: "GroupedExperts", weights: _Weights, groups: list[_Group], *, saves_projected: bool
    ) -> None:
        self.experts = experts
        self.weights = weights
        self.groups = groups
        self.saves_projected = saves_projected
        self.inputs_node: Any = None  # node of _SaveInputs
        self._kept_rows: _Rows | None = None
        self.random_state: _RandomState | None = None  # of the forward pass, if it draws dropout

    def compute(
        self, x: Tensor, counts: Tensor, scores: Tensor | None, order: Tensor | None, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the output and, if they are saved, the outputs of the first matrices."""
        experts = self.experts
        num_rows = len(x)
        if scores is not None:
            num_rows = scores.numel()  # a row for each copy of a token
        # The indices of the rows are kept for the backward pass: they take little memory, and computing them again
        # takes a launch each. With hooks on saved tensors, those of checkpointing and offloading, nothing stays on the
        # device.
        keeps_rows = self.inputs_node is not None and len(self.groups) == 1 and saved_tensor_hooks() is None
        out: Tensor | None = None
        projected: list[Tensor] = []
        for group in self.groups:
            weights = self.weights.of_group(tensors, group)
            rows = _Rows(group, counts, scores, order)
            if keeps_rows:
                self._kept_rows = rows
            inputs = rows.gather(x)
            projected = []  # [r, h] each; those of the group before are freed
            for name in experts.input_matrices:
                projected.append(_Projection(experts, name, inputs, rows.by_expert, weights).output())
            del inputs
            hidden = experts.activate(*projected)  # [r, h]
            if not self.saves_projected:
                projected = []
            group_out = _Projection(experts, _OUTPUT_MATRIX, hidden, rows.by_expert, weights).output()  # [r, d]
            group_scores = rows.scores(group_out.dtype)
            if group_scores is not None:
                group_out *= group_scores
            if out is None:
                out = group_out.new_empty(num_rows, group_out.shape[1])
            rows.scatter(group_out, out)
        if out is None:  # there are no rows
            out = torch.zeros_like(x)
        elif scores is not None:
            by_token = out.view(*scores.shape, -1)  # [t * k, d] -> [t, k, d]
            out = by_token.sum(1)
        return out, projected  # of the only group, if they are saved: several groups save none

    def rows_of(self, group: _Group, counts: Tensor, scores: Tensor | None, order: Tensor | None) -> _Rows:
        """Return the rows of a group in the backward pass: those of the forward pass if they were kept."""
        if self._kept_rows is None:
            return _Rows(group, counts, scores, order)
        rows = self._kept_rows
        self._kept_rows = None
        return rows


class _SaveInputs(torch.autograd.Function):
    """Identity that saves its inputs, before the experts are computed.

    Activation checkpointing computes a layer again until the last saved tensor is there. If :class:`_FrozenExperts`
    saved its inputs, autograd would save them after its output is computed: the experts, often the end of a layer,
    would be computed once more for nothing. So this node saves them, and that of the experts reads them here.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        # Otherwise all outputs would need gradients, and so would the frozen matrices.
        frozen = []
        for tensor, needs_gradient in zip(tensors, ctx.needs_input_grad, strict=True):
            if tensor is not None and not needs_gradient:
                frozen.append(tensor)
        ctx.mark_non_differentiable(*frozen)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


class _FrozenExperts(torch.autograd.Function):
    """Output of experts with frozen matrices; only adapters and other parameters may have gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        x: Tensor,
        counts: Tensor,
        scores: Tensor | None,
        order: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.call = call
        out, projected = call.compute(x, counts, scores, order, tensors)
        ctx.save_for_backward(*projected)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        # Read once: with activation checkpointing, reading saved tensors computes a layer again.
        x, counts, scores, order, *tensors = call.inputs_node.saved_tensors
        projected = ctx.saved_tensors
        _, needs_x, _, needs_scores, _, *needs_tensors = ctx.needs_input_grad
        copies_per_token = 1
        if scores is not None:
            copies_per_token = scores.shape[1]
        grad_x: Tensor | None = None
        grad_scores: Tensor | None = None
        if needs_scores:
            grad_scores = torch.empty_like(scores)
        trained: dict[str, Tensor] = {}  # name -> gradient, which stays zero for experts without rows
        for position, needs_gradient in enumerate(needs_tensors):
            if needs_gradient:
                trained[call.weights.name_of(position)] = torch.zeros_like(tensors[position])

        random_numbers: AbstractContextManager[None] = nullcontext()
        if call.random_state is not None:
            random_numbers = call.random_state.repeated()  # dropout must have the masks of the forward pass
        with random_numbers:
            for group in call.groups:
                rows = call.rows_of(group, counts, scores, order)
                gradients = _backward_of_group(
                    call.experts,
                    rows,
                    x,
                    call.weights.of_group(tensors, group),
                    projected,
                    grad,
                    list(trained),
                    needs_x=needs_x,
                )
                for name, gradient in gradients.trained.items():
                    trained[name][group.experts] = gradient
                if needs_x:
                    if grad_x is None:  # only now, when the first group has freed its activations
                        grad_x = x.new_empty(len(x) * copies_per_token, x.shape[1])
                    rows.scatter(gradients.x, grad_x)
                if grad_scores is not None:
                    rows.scatter(gradients.scores.to(grad_scores.dtype), grad_scores.view(-1))
                del gradients

        if needs_x and grad_x is None:  # there are no rows
            grad_x = torch.zeros_like(x)
        elif needs_x and copies_per_token > 1:
            by_token = grad_x.unflatten(0, (-1, copies_per_token))  # [t * k, d] -> [t, k, d]
            grad_x = by_token.sum(1)
        grad_tensors: list[Tensor | None] = []
        for position, needs_gradient in enumerate(needs_tensors):
            gradient = None
            if needs_gradient:
                gradient = trained[call.weights.name_of(position)]
            grad_tensors.append(gradient)
        return None, grad_x, None, grad_scores, None, *grad_tensors


class _GroupGradients(NamedTuple):
    """Gradients of a group of experts.

    Attributes:
        x: of the rows ``[r, d]``, None if they need none.
        scores: of the scores ``[r]``, None without scores.
        trained: of trained parameters by name.
    """

    x: Tensor | None
    scores: Tensor | None
    trained: dict[str, Tensor]


class _Projection:
    """Product of a group's rows with a frozen matrix, plus an adapter's update and a bias.

    Args:
        experts: the experts.
        name: name of the matrix.
        x: rows ``[r, i]``.
        rows: the rows of each expert.
        weights: the parameters of the group's experts.
    """

    def __init__(
        self, experts: "GroupedExperts", name: str, x: Tensor, rows: RowGroups, weights: Mapping[str, Tensor]
    ) -> None:
        self.x = x
        self.rows = rows
        self.matrix = weights[name]  # [e, i, o]
        self.bias = experts.bias(name, weights)
        self.adapter = experts.adapter(name, weights)
        self.mask: Tensor | None = None
        self.low: Tensor | None = None
        if self.adapter is not None:
            self.mask = experts.draw_dropout_mask(x)
            low = grouped_mm(self._adapter_input(), self.adapter.a, rows)  # [r, rank]
            self.low = low * self.adapter.scaling

    def _adapter_input(self) -> Tensor:
        """Return the rows after dropout; they are computed again for the backward pass, not kept."""
        if self.mask is None:
            return self.x
        return self.x * self.mask

    def output(self) -> Tensor:
        """Compute the output ``[r, o]``."""
        out = grouped_mm(self.x, self.matrix, self.rows)
        if self.adapter is not None:
            out += grouped_mm(self.low, self.adapter.b, self.rows)
        if self.bias is not None:
            out += repeat_by_group(self.bias.values, self.rows, len(out))
        return out

    def backward(
        self,
        grad: Tensor,
        needed: Collection[str],
        scores: Tensor | None = None,
        *,
        needs_x: bool = True,
        grad_x: Tensor | None = None,
    ) -> _GroupGradients:
        """Compute the gradients from that of the output, or of the output times ``scores``.

        Args:
            grad: ``[r, o]``.
            needed: names of parameters that are trained.
            scores: ``[r, 1]``; with scores the rows need a gradient.
            needs_x: whether the rows have a gradient.
            grad_x: gradient of the rows by other matrices, to which this is added in place.
        """
        trained: dict[str, Tensor] = {}
        grad_scores: Tensor | None = None
        if needs_x:
            grad_by_matrix = grouped_mm(grad, self.matrix.transpose(1, 2), self.rows)  # [r, i]
            if scores is not None:
                # The gradient of a score is output · grad, where (x W) · grad = x · (grad Wᵀ).
                grad_scores = (self.x * grad_by_matrix).sum(-1, dtype=torch.float32)
                grad_by_matrix *= scores
            if grad_x is None:
                grad_x = grad_by_matrix
            else:
                grad_x.add_(grad_by_matrix)
            del grad_by_matrix

        if self.adapter is not None:
            low = self.low
            grad_low = grouped_mm(grad, self.adapter.b.transpose(1, 2), self.rows)  # [r, rank]
            if scores is not None:
                grad_scores += (low * grad_low).sum(-1, dtype=torch.float32)
                # Scores scale both narrow factors, instead of `grad` [r, o].
                low = low * scores
                grad_low = grad_low * scores
            grad_low = grad_low * self.adapter.scaling
            if self.adapter.b_name in needed:
                trained[self.adapter.b_name] = grouped_outer(low, grad, self.rows)
            if self.adapter.a_name in needed:
                trained[self.adapter.a_name] = grouped_outer(self._adapter_input(), grad_low, self.rows)
            if needs_x:
                grad_adapter_input = grouped_mm(grad_low, self.adapter.a.transpose(1, 2), self.rows)  # [r, i]
                if self.mask is not None:
                    grad_adapter_input = grad_adapter_input * self.mask
                grad_x += grad_adapter_input

        if self.bias is not None:
            if scores is not None:
                bias_of_rows = repeat_by_group(self.bias.values, self.rows, len(grad))
                grad_scores += (bias_of_rows * grad).sum(-1, dtype=torch.float32)
            if self.bias.name in needed:
                grad_bias_of_rows = grad
                if scores is not None:
                    grad_bias_of_rows = grad * scores
                trained[self.bias.name] = sum_by_group(grad_bias_of_rows, self.rows)
        return _GroupGradients(grad_x, grad_scores, trained)


def _backward_of_group(
    experts: "GroupedExperts",
    rows: _Rows,
    x: Tensor,
    weights: Mapping[str, Tensor],
    projected: Sequence[Tensor],
    grad: Tensor,
    needed: Collection[str],
    *,
    needs_x: bool,
) -> _GroupGradients:
    """Compute the gradients of a group of experts.

    Args:
        experts: the experts.
        rows: the rows of the group.
        x: all rows, or all tokens.
        weights: the parameters of the group's experts.
        projected: outputs of the first matrices; they are computed again if they were not saved.
        grad: gradient of the output.
        needed: names of parameters that are trained.
        needs_x: whether the rows have a gradient.
    """
    # In the order of the forward pass, in which dropout draws its masks.
    inputs = rows.gather(x)
    projections = [_Projection(experts, name, inputs, rows.by_expert, weights) for name in experts.input_matrices]
    if not projected:
        projected = [projection.output() for projection in projections]
    # Autograd differentiates the activation alone: the products have their gradients in _Projection.
    leaves = [output.detach().requires_grad_() for output in projected]
    with torch.enable_grad():
        hidden = experts.activate(*leaves)  # [r, h]
    output_projection = _Projection(experts, _OUTPUT_MATRIX, hidden.detach(), rows.by_expert, weights)
    # Of the output matrix's input, which is `hidden`, of its parameters and of the scores.
    output_gradients = output_projection.backward(rows.gather(grad), needed, rows.scores(grad.dtype))
    del output_projection  # and all that it holds, before the next tensors are made
    grad_projected = list(torch.autograd.grad(hidden, leaves, output_gradients.x))  # [r, h] each
    del hidden, leaves, projected

    trained = dict(output_gradients.trained)
    grad_x: Tensor | None = None
    while projections:  # each is freed before the next
        gradients = projections.pop().backward(grad_projected.pop(), needed, needs_x=needs_x, grad_x=grad_x)
        trained.update(gradients.trained)
        grad_x = gradients.x
    return _GroupGradients(grad_x, output_gradients.scores, trained)


class _RandomState:
    """State of the random numbers of the host and of a device, at the time when it is made.

    Args:
        device: device of the experts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_host = torch.get_rng_state()
        self._of_device: Tensor | None = None
        if device.type == "cuda":
            self._of_device = torch.cuda.get_rng_state(device)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Draw the same numbers again inside the block, and go on afterward as if it had drawn none."""
        forked_devices = []
        if self._of_device is not None:
            forked_devices.append(self._device)
        with torch.random.fork_rng(forked_devices):
            torch.set_rng_state(self._of_host)
            if self._of_device is not None:
                torch.cuda.set_rng_state(self._of_device, self._device)
            yield


def apply_frozen_experts(
    experts: "GroupedExperts", x: Tensor, counts: Tensor, selection: Selection | None = None
) -> Tensor:
    """Apply experts with frozen matrices.

    Args:
        experts: the experts.
        x: rows ``[t, d]`` sorted by expert; with ``selection``, tokens.
        counts: rows per expert, int64 ``[e]``.
        selection: the experts of each token.

    Returns:
        Tensor ``[t, d]``.
    """
    weights = _Weights(experts.stacked_weights())
    scores: Tensor | None = None
    order: Tensor | None = None
    num_rows = len(x)
    if selection is not None:
        scores = selection.scores
        order = selection.order
        num_rows = order.numel()  # a row for each copy of a token
    groups = _make_groups(experts, weights, counts, num_rows)
    # Decoded weights come in groups of experts, and only one group's outputs could be saved; a recomputed layer saves
    # nothing.
    saves_projected = not (weights.decoded_dtypes or experts.recomputes)
    call = _Call(experts, weights, groups, saves_projected=saves_projected)
    inputs = (x, counts, scores, order, *weights.tensors)
    needs_gradients = any(tensor is not None and tensor.requires_grad for tensor in inputs)
    if not (needs_gradients and torch.is_grad_enabled()):  # nothing is saved for a backward pass
        out, _ = call.compute(x, counts, scores, order, weights.tensors)
        return out
    if experts.draws_random_numbers():  # before the forward pass draws the dropout that the backward pass repeats
        call.random_state = _RandomState(x.device)
    # Two nodes: the first saves the inputs before the experts are computed (see _SaveInputs), and the backward pass of
    # the second reads them from the first.
    inputs = _SaveInputs.apply(*inputs)
    call.inputs_node = next(tensor.grad_fn for tensor in inputs if tensor is not None and tensor.requires_grad)
    return _FrozenExperts.apply(call, *inputs)
