"""Chunked linear attention with a decaying state: the common part of the gated delta rule and Mamba 2."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.utils import launches_kernels

CHUNK = 64  # positions; the state before each chunk is saved for the backward pass

# Largest number of elements of a tensor of a group, the chunks that are computed at once. Forward passes keep up to 8
# tensors of this size in float32, and backward passes up to 15: on a GPU 960 MiB, whose kernels take longer than the
# host needs to launch the next ones. On a CPU, tensors stay in the cache of a core, and large models have groups of one
# chunk.
_GROUP_ELEMENTS = {"cpu": 2**17}
_GROUP_ELEMENTS_OF_GPUS = 2**24

# Logarithm of a decay to nothing, exp(-1000) = 0: a document does not see the state that an earlier one left. Minus
# infinity would make differences of cumulative sums undefined, and a larger magnitude would cost them digits.
_CLOSED = -1000.0

Rule = Callable[..., tuple[Tensor, Tensor]]


class Chunks(ABC):
    """Base class of m chunks of c positions each, for all heads, in float32.

    The chunks of b sequences are computed at once as n = m * b matrices, the first chunk of all sequences first. Only
    the states go from chunk to chunk: before them, and after the last one, they are ``states`` ``[m + 1, b, ...]``.
    ``d(i, j) = exp(g_{j+1} + ... + g_i)`` is the decay between positions i >= j of one document.

    Args:
        q: ``[m, b, c, n_k, h_k]``.
        k: ``[m, b, c, n_k, h_k]``.
        v: ``[m, b, c, n_v, h_v]``.
        g: logarithm of the decay ``[m, b, c, n_v]``.
        beta: write strength ``[m, b, c, n_v]``.
        resets: bool ``[m, b, c]``, True at the first positions of documents.

    Attributes:
        q: queries ``[n, n_k, 1, c, h_k]``.
        k: keys ``[n, n_k, 1, c, h_k]``.
        v: values ``[n, n_k, r, c, h_v]``; r value heads share a key head.
        beta: write strength ``[n, n_k, r, c, 1]``.
        decay: d ``[n, n_k, r, c, c]``, 0 above the diagonal and between documents.
        since_state: decay of the incoming state ``[n, n_k, r, c, 1]``, 0 after a new document has begun.
        until_end: decay until the last position ``[n, n_k, r, c, 1]``, 0 in documents that end before it.
        log_since_start: logarithm of the decay from the first state to each later one, float64 ``[b * n_v, m]``; None
            with one chunk, or if the class does not need it.
    """

    # Whether the states of all chunks are computed as one matrix product, with the decays between them.
    multiplies_states: ClassVar[bool] = False

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor) -> None:
        key_heads = k.shape[3]
        self.num_chunks = k.shape[0]
        self.q = heads_first(q, key_heads)
        self.k = heads_first(k, key_heads)
        self.v = heads_first(v, key_heads)
        self.beta = _scalars_heads_first(beta, key_heads)[..., None]
        # What a document's first position decays belongs to the document before it: a decay to nothing.
        log_decays = g.float().masked_fill(resets[..., None], _CLOSED)
        log_decays = _scalars_heads_first(log_decays, key_heads)  # [n, n_k, r, c]
        num_positions = log_decays.shape[-1]
        if launches_kernels(log_decays.device):
            # A product with a constant sums g over all pairs of positions: two launches, where five are below. float32
            # is enough, because nothing is subtracted.
            by_head = log_decays.flatten(1, 2)  # [n, n_v, c]
            pairs, causal_mask = _pairs_of_positions(num_positions, log_decays.device)
            pairs_of_matrices = pairs.expand(len(by_head), -1, -1)  # [n, c, c + c * c]
            sums = torch.baddbmm(causal_mask, by_head, pairs_of_matrices)
            sums = sums.view(*log_decays.shape[:3], -1)  # [n, n_k, r, c + c * c]
            # Before exp_, which overwrites the logarithms.
            self.log_since_start = self._log_since_start(sums[..., num_positions - 1])
            since_state, decay = sums.exp_().split((num_positions, num_positions**2), dim=-1)
            self.since_state = since_state[..., None]
            self.decay = decay.unflatten(-1, (num_positions, num_positions))
        else:
            # float64, because small differences of a large cumulative sum have only about three digits in float32.
            log_since_state = log_decays.cumsum(-1, dtype=torch.float64)
            self.log_since_start = self._log_since_start(log_since_state[..., -1])
            self.decay = decays_between(log_since_state)
            since_state = torch.empty_like(log_decays, memory_format=torch.contiguous_format)
            self.since_state = torch.exp(log_since_state, out=since_state)[..., None]
        self.until_end = self.decay[..., -1, :, None]

    def _log_since_start(self, log_decays: Tensor) -> Tensor | None:
        """Sum the logarithms of the chunks' decays ``[n, n_k, r]``, for :attr:`log_since_start`."""
        if self.num_chunks == 1 or not self.multiplies_states:
            return None
        by_chunk = self.split(log_decays)  # [m, b, n_k, r]
        by_head = by_chunk.movedim(0, -1).flatten(0, 2)  # [b * n_v, m]
        return by_head.cumsum(-1, dtype=torch.float64)

    @staticmethod
    @abstractmethod
    def state_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return the shape of the state for keys ``[b, s, n_k, h_k]`` and values ``[b, s, n_v, h_v]``."""

    @classmethod
    def elements_of_chunk(cls, k: Tensor, v: Tensor) -> int:
        """Return the number of elements of the largest tensor that a chunk needs, for k and v of a sequence."""
        rows, _, value_heads, value_dim = v.shape
        key_dim = k.shape[-1]
        # A position has vectors, and decays to all positions of its chunk; a chunk has a state.
        elements_of_head = max(CHUNK * CHUNK, CHUNK * key_dim, CHUNK * value_dim, key_dim * value_dim)
        return rows * value_heads * elements_of_head

    @abstractmethod
    def read(self, states: Tensor, out: Tensor, *, starts_empty: bool) -> None:
        """Write the outputs, and the states after the chunks.

        Args:
            states: ``[m + 1, b, ...]``; ``states[0]`` is given, the others are written.
            out: where outputs are written, ``[m, b, n_k, r, c, h_v]``.
            starts_empty: whether ``states[0]`` is zero.
        """

    @abstractmethod
    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the output and the state after a single position, by the recurrence."""

    @abstractmethod
    def gradients(self, states: Tensor, d_out: Tensor, d_state: Tensor | None, grads: Sequence[Tensor]) -> Tensor:
        """Write the gradients of the arguments q, k, v, g and beta.

        Args:
            states: the states before the chunks, and after the last one, ``[m + 1, b, ...]``.
            d_out: gradient of the outputs ``[n, n_k, r, c, h_v]``.
            d_state: gradient of the state after the last chunk ``[b, ...]``; None: zero.
            grads: where gradients are written, ``[m, b, n_k, r, c, h]`` for q, k and v, of which q and k have r = 1,
                and ``[m, b, n_k, r, c]`` for g and beta.

        Returns:
            The gradient of the state before the first chunk, ``[b, ...]``.
        """

    def split(self, x: Tensor) -> Tensor:
        """Split ``[n, ...]`` into chunks and sequences ``[m, b, ...]``."""
        return x.unflatten(0, (self.num_chunks, -1))

    def d_g(self, d_log_decay: Tensor, d_log_since: Tensor, d_log_until: Tensor) -> Tensor:
        """Compute the gradient of g, ``[n, n_k, r, c]``.

        Args:
            d_log_decay: gradient of the logarithm of ``decay``, ``[n, n_k, r, c, c]``; changed.
            d_log_since: gradient of the logarithm of ``since_state``, ``[n, n_k, r, c]``.
            d_log_until: gradient of the logarithm of ``until_end``, ``[n, n_k, r, c]``.
        """
        d_log_decay[..., -1, :] += d_log_until
        # Of the cumulative sums G: log decay(i, j) is G_i - G_j, log since_state G_i.
        d_cumulative = d_log_decay.sum(-1)
        d_cumulative.sub_(d_log_decay.sum(-2)).add_(d_log_since)
        # g_i is part of G_i and of all later sums.
        return sum_of_later(d_cumulative)


def decays_between(cumulative: Tensor) -> Tensor:
    """Return ``exp(G_i - G_j)`` for i >= j and 0 elsewhere, float32 ``[..., c, c]``, of float64 sums G ``[..., c]``."""
    shape = (*cumulative.shape, cumulative.shape[-1])
    between = torch.empty(shape, dtype=torch.float32, device=cumulative.device)
    torch.sub(cumulative[..., :, None], cumulative[..., None, :], out=between)  # in float64, then rounded
    return between.exp_().tril_()


@functools.cache
def _pairs_of_positions(c: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the constants that turn g of c positions into the logarithms of all decays.

    Returns:
        ``[c, c + c * c]``: 1 where the decay of a column has g of the row as a factor. The first c columns are the
        decays since the incoming state, column c + i * c + j is the one between the positions i and j. And
        ``[c + c * c]``: minus infinity where j > i, else 0.
    """
    position = torch.arange(c, device=device)
    since_state = position[:, None] <= position  # [c, c]
    is_of_pair = (position[:, None, None] > position) & since_state[:, :, None]  # [c, i, j]
    causal_mask = torch.full((c, c), float("-inf"), device=device).triu(1)
    pairs = torch.cat([since_state, is_of_pair.flatten(1)], dim=1)  # [c, c + c * c]
    mask_of_pairs = torch.cat([causal_mask.new_zeros(c), causal_mask.flatten()])  # [c + c * c]
    return pairs.float(), mask_of_pairs


@functools.cache
def _later_positions(c: int, device: torch.device) -> Tensor:
    """Return a matrix ``[c, c]`` by which a row of c numbers becomes the sums of each and all later ones."""
    return torch.ones(c, c, device=device).tril_()


def sum_of_later(x: Tensor) -> Tensor:
    """Return the sums of each element and all later ones in the last dimension of a float32 tensor."""
    return x @ _later_positions(x.shape[-1], x.device)


def heads_first(x: Tensor, key_heads: int) -> Tensor:
    """Permute ``[m, b, c, n_v, h_v]`` to float32 ``[n, n_k, r, c, h_v]``."""
    by_key_head = x.unflatten(3, (key_heads, -1))  # [m, b, c, n_k, r, h_v]
    x = by_key_head.permute(0, 1, 3, 4, 2, 5)  # [m, b, n_k, r, c, h_v]
    # In the new order at once: products read it several times.
    return x.to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)


def _scalars_heads_first(x: Tensor, key_heads: int) -> Tensor:
    """Permute ``[m, b, c, n_v]`` to float32 ``[n, n_k, r, c]``."""
    by_key_head = x.unflatten(3, (key_heads, -1))  # [m, b, c, n_k, r]
    x = by_key_head.permute(0, 1, 3, 4, 2)  # [m, b, n_k, r, c]
    return x.to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)


def _chunks_per_group(kind: type[Chunks], k: Tensor, v: Tensor) -> int:
    """Return how many chunks of keys ``[b, s, n_k, h_k]`` and values ``[b, s, n_v, h_v]`` are computed at once."""
    limit = _GROUP_ELEMENTS.get(k.device.type, _GROUP_ELEMENTS_OF_GPUS)
    return max(1, limit // max(1, kind.elements_of_chunk(k, v)))


def _pad(x: Tensor, chunks_per_group: int) -> Tensor:
    """Append positions that write nothing, to ``[b, s, ...]``, until the last group has whole chunks."""
    positions_of_last_group = x.shape[1] % (chunks_per_group * CHUNK)
    if positions_of_last_group <= CHUNK:
        return x  # it has one chunk, which may be shorter
    missing = -x.shape[1] % CHUNK
    if not missing:
        return x
    # F.pad takes the last dimensions first, here those after the positions.
    no_padding = (0, 0) * (x.ndim - 2)
    return F.pad(x, (*no_padding, 0, missing))


class _Group(NamedTuple):
    """Chunks that are computed at once.

    Attributes:
        positions: their positions in the sequence.
        start: index of the first chunk.
        num_chunks: number of chunks.
    """

    positions: slice
    start: int
    num_chunks: int

    def chunks_of(self, x: Tensor) -> Tensor:
        """View the group's positions of ``[b, s, ...]`` as ``[m, b, c, ...]``."""
        by_chunk = x[:, self.positions].unflatten(1, (self.num_chunks, -1))  # [b, m, c, ...]
        return by_chunk.transpose(0, 1)

    def heads_first(self, x: Tensor, key_heads: int) -> Tensor:
        """View the group's positions of ``[b, s, n_v, ...]`` as ``[m, b, n_k, r, c, ...]``."""
        by_key_head = self.chunks_of(x).unflatten(3, (key_heads, -1))  # [m, b, c, n_k, r, ...]
        return by_key_head.movedim(2, 4)

    @property
    def end(self) -> int:
        """Index of the chunk after the group."""
        return self.start + self.num_chunks


def _groups(num_positions: int, chunks_per_group: int) -> list[_Group]:
    groups = []
    size = chunks_per_group * CHUNK
    for start in range(0, num_positions, size):
        stop = min(start + size, num_positions)
        num_chunks = max(1, (stop - start) // CHUNK)  # a chunk may be shorter
        groups.append(_Group(slice(start, stop), start // CHUNK, num_chunks))
    return groups


def chunked(name: str, kind: type[Chunks]) -> Rule:
    """Make the function of a chunked recurrence, and its operator ``torchtune::name``.

    For the backward pass, it saves only the inputs and the state at the beginning of each chunk.

    Args:
        name: name of the operator.
        kind: class that computes a group of chunks.

    Returns:
        ``rule(q, k, v, g, beta, resets, state=None)``, which returns the outputs ``[b, s, n_v, h_v]`` in the dtype of
        ``v`` and the state after the last position, float32 and without a gradient.
    """

    def empty_states(k: Tensor, v: Tensor) -> Tensor:
        """Allocate the states before each chunk, and after the last one."""
        num_chunks = -(-k.shape[1] // CHUNK)  # rounded up
        shape = (num_chunks + 1, *kind.state_shape(k, v))
        return k.new_empty(shape, dtype=torch.float32)

    def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)

    @torch.library.custom_op(f"torchtune::{name}", mutates_args=())
    def forward(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        states = empty_states(k, v)
        states[0] = 0.0 if state is None else state  # before the first chunk
        chunks_per_group = _chunks_per_group(kind, k, v)
        inputs = [_pad(tensor, chunks_per_group) for tensor in (q, k, v, g, beta, resets)]
        out = torch.empty_like(inputs[2], memory_format=torch.contiguous_format)
        for group in _groups(out.shape[1], chunks_per_group):
            chunks = kind(*map(group.chunks_of, inputs))
            chunks.read(
                states[group.start : group.end + 1],  # with the state after the group
                group.heads_first(out, k.shape[2]),
                starts_empty=state is None and group.start == 0,
            )
            del chunks  # before the next group allocates its own
        return out[:, : v.shape[1]].contiguous(), states  # without padding; the fake operator's output is contiguous

    @torch.library.custom_op(f"torchtune::{name}_backward", mutates_args=())
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        chunks_per_group = _chunks_per_group(kind, k, v)
        d_state = None  # the state after the last position has no gradient
        grad, *inputs = (_pad(tensor, chunks_per_group) for tensor in (grad, q, k, v, g, beta, resets))
        grads = empty_gradients(*inputs[:-1])  # `resets` has none
        for group in reversed(_groups(grad.shape[1], chunks_per_group)):  # a state gets its gradient from later chunks
            chunks = kind(*map(group.chunks_of, inputs))
            d_out = heads_first(group.chunks_of(grad), k.shape[2])
            grads_of_group = [group.heads_first(tensor, k.shape[2]) for tensor in grads]
            d_state = chunks.gradients(states[group.start : group.end + 1], d_out, d_state, grads_of_group)
            del chunks, d_out  # before the next group allocates its own
        return tuple(tensor[:, : k.shape[1]].contiguous() for tensor in grads)

    @forward.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(v, memory_format=torch.contiguous_format), empty_states(k, v)

    @backward.register_fake
    def _(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return empty_gradients(q, k, v, g, beta)

    def setup_context(ctx, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, _ = inputs  # without the state before the first position
        _, states = output
        ctx.save_for_backward(*tensors, states)
        ctx.mark_non_differentiable(states)
        ctx.set_materialize_grads(False)  # of the states: zeros, as large as they are

    def formula(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        # Neither `resets` nor the state before the first position has a gradient.
        return *backward(grad, *ctx.saved_tensors), None, None

    forward.register_autograd(formula, setup_context=setup_context)

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        is_decoding = k.shape[1] == 1 and state is not None and not torch.is_grad_enabled()
        if is_decoding:  # the recurrence itself, without a chunk's matrices and saved states
            inputs = [tensor[None] for tensor in (q, k, v, g, beta, resets)]  # one chunk of one position
            out, state = kind(*inputs).step(state)  # [b, n_k, r, 1, h_v]
            positions_first = out.movedim(3, 1)  # [b, 1, n_k, r, h_v]
            return positions_first.reshape(v.shape).to(v.dtype), state
        out, states = forward(q, k, v, g, beta, resets, state)
        return out, states[-1]

    return rule
