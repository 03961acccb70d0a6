"""Batched generation of tokens and their log-probabilities, streaming or whole."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.generation._generation import Progress, evaluating, last_hidden, noise, sample
from torchtune.modules.common_utils import _attention_modules
from torchtune.modules.kv_cache import KVCache
from torchtune.modules.transformer import TransformerDecoder
from torchtune.utils import UserError

Prompts = Sequence[Tensor | Sequence[int]]


class GenerationError(UserError, ValueError):
    """Invalid prompts or settings of generation."""


@dataclass(frozen=True)
class TokenStep:
    """The next token of every unfinished sequence.

    Args:
        rows: indices of the sequences, int64 ``[m]``: sample j of prompt i is ``i * num_samples + j``.
        tokens: int64 ``[m]``.
        log_probs: float32 ``[m]``.
    """

    rows: Tensor
    tokens: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class GeneratedTokens:
    """Generated sequences without prompts and padding; sample j of prompt i is item ``i * num_samples + j``.

    Args:
        tokens: of each sequence, int64 ``[length]``, the stop token included.
        log_probs: of each token, float32 ``[length]``.
    """

    tokens: list[Tensor]
    log_probs: list[Tensor]


def generate_tokens(
    model: TransformerDecoder,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_tokens: Sequence[int] | None = None,
    rng: torch.Generator | None = None,
    draws: Tensor | None = None,
    use_cache: bool = True,
) -> GeneratedTokens:
    """Generate ``num_samples`` continuations of every prompt. Arguments and errors: see :func:`stream_tokens`.

    Returns:
        Tokens and their log-probabilities, on the device of the prompts.
    """
    steps = list(
        stream_tokens(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            temperature=temperature,
            top_k=top_k,
            stop_tokens=stop_tokens,
            rng=rng,
            draws=draws,
            use_cache=use_cache,
        )
    )
    rows = torch.cat([step.rows for step in steps])
    order = rows.argsort(stable=True)
    lengths = rows.bincount(minlength=len(prompts) * num_samples).tolist()
    tokens, log_probs = (
        torch.cat(parts)[order].split(lengths)
        for parts in ([step.tokens for step in steps], [step.log_probs for step in steps])
    )
    return GeneratedTokens(list(tokens), list(log_probs))


@torch.no_grad()
def stream_tokens(
    model: TransformerDecoder,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_tokens: Sequence[int] | None = None,
    rng: torch.Generator | None = None,
    draws: Tensor | None = None,
    use_cache: bool = True,
) -> Iterator[TokenStep]:
    """Generate ``num_samples`` continuations of every prompt, and yield the tokens of each step.

    Each prompt is prefilled once and expanded to ``num_samples`` rows; finished sequences leave the batch. The model
    runs in evaluation mode with its own KV caches. When the iterator ends, is closed or raises, training mode and
    caches are restored. ``skip_output_layer`` has no effect.

    With FSDP, all ranks must call it together, each with at least one prompt and the same ``max_new_tokens`` and
    ``use_cache``. With tensor parallelism, the ranks of a group pass the same prompts and get the same tokens.

    Args:
        model: the decoder.
        prompts: tokens of each prompt, int64 ``[s]`` or a list, not empty.
        max_new_tokens: maximum number of new tokens per sequence.
        num_samples: number of continuations per prompt.
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_k: sample from the k most likely tokens; ``None`` or 0 samples from all.
        stop_tokens: tokens that end a sequence; they are returned.
        rng: random generator, on the device of the prompts.
        draws: uniform random numbers in [0, 1), float64 ``[sequences, max_new_tokens]``, in the place of ``rng``: one
            decides each token, so that no sequence depends on the others or on when they end.
        use_cache: use a KV cache; without one, every step runs the model on the whole sequence.

    Yields:
        The next token of every unfinished sequence and its log-probability under softmax(logits / temperature), or
        under softmax(logits) at temperature 0. ``top_k`` does not change log-probabilities.

    Raises:
        GenerationError: there is no prompt or an empty one, a count is below 1, the sequence exceeds the model's
            ``max_seq_len``, ``draws`` come with ``top_k`` or have another shape, or the model is context parallel.
    """
    if draws is not None and (top_k or draws.shape != (len(prompts) * num_samples, max_new_tokens)):
        shape = [len(prompts) * num_samples, max_new_tokens]
        raise GenerationError(f"draws decide among all tokens: give numbers {shape}, and no top_k.")
    ranks = _Ranks(model)
    tokens, lengths = _padded(model, prompts, max_new_tokens, num_samples)
    stop = torch.tensor(list(stop_tokens or ()), dtype=torch.int64, device=tokens.device)
    rows = torch.arange(len(tokens), device=tokens.device).repeat_interleave(num_samples)
    cache_length = ranks.multiple(tokens.shape[1] + max_new_tokens) if use_cache else None
    caches = nullcontext([]) if cache_length is None else _own_caches(model, len(rows), cache_length, tokens)
    idle = False  # this rank has finished, but must join the collectives of the other ranks' forward passes
    with ranks, evaluating(model), caches as kv_caches:
        state = Progress(tokens, lengths, cache_length)
        for step in range(max_new_tokens):
            logits = _next_logits(model, state, ranks, kv_caches)
            if step == 0 and num_samples > 1:
                logits = logits[rows]
                _select(rows, state, kv_caches)
                rows = torch.arange(len(rows), device=rows.device)
            if draws is None or temperature == 0.0:
                q = noise(model, len(rows), rng, tokens)
                drawn = sample(logits, temperature=temperature, top_k=top_k, q=q)
            else:
                drawn = _invert(logits / temperature, draws[rows, step])
            drawn = ranks.agree(drawn)
            state.append(drawn)
            if not idle:
                log_p = (logits / (temperature or 1.0)).log_softmax(-1).gather(-1, drawn)
                yield TokenStep(rows, drawn[:, 0], log_p[:, 0])
            going = (torch.isin(drawn[:, 0], stop, invert=True) & (not idle)).nonzero()[:, 0]
            if not ranks.any(len(going) > 0):
                return
            if len(going) < len(rows) and not (idle and len(rows) == 1):
                idle = not len(going)
                going = going if len(going) else going.new_zeros(1)
                rows = rows[going]
                _select(going, state, kv_caches)


def _invert(logits: Tensor, draws: Tensor) -> Tensor:
    """The tokens ``[m, 1]`` at which the cumulated probabilities of logits ``[m, v]`` pass ``draws`` ``[m]``."""
    cumulated = logits.softmax(-1).cumsum(-1)
    wanted = (draws[:, None] * cumulated[:, -1:]).to(cumulated.dtype)
    return torch.searchsorted(cumulated, wanted, right=True).clamp(max=logits.shape[-1] - 1)


def _padded(model: TransformerDecoder, prompts: Prompts, max_new_tokens: int, num_samples: int) -> tuple[Tensor, ...]:
    """Left-padded prompts ``[b, s]`` and their lengths ``[b]``."""
    if max_new_tokens < 1 or num_samples < 1:
        raise GenerationError(
            f"max_new_tokens is {max_new_tokens} and num_samples {num_samples}: both must be at least 1."
        )
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise GenerationError("prompts: give at least one, and at least one token in each.")
    device = prompts[0].device if isinstance(prompts[0], Tensor) else model.tok_embeddings.weight.device
    rows = [torch.as_tensor(prompt, dtype=torch.int64, device=device) for prompt in prompts]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    longest = int(lengths.max())
    if longest + max_new_tokens - 1 > model.max_seq_len:
        raise GenerationError(
            f"A prompt of {longest} tokens and {max_new_tokens} new ones are more than the model's max_seq_len "
            f"{model.max_seq_len}: ask for fewer."
        )
    return torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows]), lengths


@contextmanager
def _own_caches(model: TransformerDecoder, batch_size: int, length: int, like: Tensor) -> Iterator[list[KVCache]]:
    """Context manager for new KV caches on the device of ``like``; restores the previous caches."""
    attentions = _attention_modules(model)
    before = [(module, module.kv_cache, module.cache_enabled) for module in attentions]
    lengths = model.encoder_max_cache_seq_len, model.decoder_max_cache_seq_len
    for module in attentions:
        module.kv_cache, module.cache_enabled = None, False
    try:
        with like.device:
            model.setup_caches(batch_size, model.tok_embeddings.weight.dtype, decoder_max_seq_len=length)
        yield [module.kv_cache for module in attentions]
    finally:
        for module, cache, enabled in before:
            module.kv_cache, module.cache_enabled = cache, enabled
        model.encoder_max_cache_seq_len, model.decoder_max_cache_seq_len = lengths


def _select(rows: Tensor, state: Progress, caches: list[KVCache]) -> None:
    """Keep these rows of state and caches; rows may repeat."""
    state.select(rows)
    for cache in caches:
        cache.select(rows)


def _next_logits(model: TransformerDecoder, state: Progress, ranks: "_Ranks", caches: list[KVCache]) -> Tensor:
    """float32 ``[m, v]`` of the next token."""
    x, input_pos, mask = state.inputs()
    if caches and x.shape[1] == 1 and model.outgrows_caches(input_pos):
        model.reset_caches()
        x, input_pos, mask = state.inputs(again=True)
    length = x.shape[1]
    missing = ranks.multiple(length) - length
    if missing:  # sequence parallelism: pad on the right to a multiple; causal attention ignores it
        x, input_pos = F.pad(x, (0, missing)), F.pad(input_pos, (0, missing))
        if mask is not None:
            mask = torch.cat([mask, mask[:, -1:].expand(-1, missing, -1)], dim=1)
            mask = mask if caches else F.pad(mask, (0, missing))
    hidden = last_hidden(model, x, input_pos, mask, length - 1)
    for cache in caches if missing else ():
        cache.drop(missing)
    return model.output(hidden).float()[:, 0]


class _Ranks:
    """The ranks that share the model. As a context manager, it reshards FSDP parameters on exit."""

    def __init__(self, model: nn.Module) -> None:
        self._sharded: list[Any] = []
        self._groups: list[dist.ProcessGroup] = []
        self._tp: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        from torch.distributed.fsdp import FSDPModule

        from torchtune.modules.parallel import ContextParallelAttention

        if any(isinstance(m, ContextParallelAttention) for m in (a.attention for a in _attention_modules(model))):
            raise GenerationError("Generation does not support context parallelism: set context_parallel_dim to 1.")
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        meshes = [parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")]
        if meshes:
            mesh = max(meshes, key=lambda mesh: mesh.ndim)
            names = mesh.mesh_dim_names or ("",) * mesh.ndim
            self._groups = [mesh.get_group(index) for index, name in enumerate(names) if name != "tp"]
            self._tp = mesh["tp"].get_group() if "tp" in names else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._reshard()

    def _reshard(self) -> None:
        """Free all-gathered parameters, which would be stale after the next optimizer step."""
        for module in self._sharded:
            module.reshard()

    def multiple(self, length: int) -> int:
        """``length`` rounded up to a multiple of the sequence-parallel size."""
        return length if self._tp is None else length + -length % self._tp.size()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is True on any rank that must run the same forward passes."""
        if not self._groups:
            return flag
        found = torch.tensor(int(flag), device=self._device())
        for group in self._groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return bool(found)

    def agree(self, drawn: Tensor) -> Tensor:
        """Broadcast the samples of the tensor-parallel group's first rank."""
        if self._tp is not None:
            dist.broadcast(drawn, group=self._tp, group_src=0)
        return drawn

    def _device(self) -> torch.device:
        return torch.device("cuda") if dist.get_backend(self._groups[0]) == "nccl" else torch.device("cpu")
