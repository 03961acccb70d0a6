"""A continuous batch: rows join and leave while others continue."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import Documents, Images
from torchtune.generation._fast_linear import fast_linears
from torchtune.generation._prompts import images_of_batch
from torchtune.generation._sampling import GenerationError, LogitsProcessor, process_logits
from torchtune.modules.common_utils import attention_modules
from torchtune.modules.kv_cache import EncoderCache, KVCache, Place
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.transformer import TransformerDecoder, text_decoder
from torchtune.training.parallel import any_rank, reshard
from torchtune.utils import to_device

# (tokens [m, 1], positions [m, 1], mask [m, 1, t] or None) -> logits [m, v]
Step = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# Keys and values [n_kv, s, hd] of each KV cache.
Past = list[tuple[Tensor, Tensor]]


@dataclass
class Request:
    """A prompt: index of its first sequence, tokens, maximum number of new tokens, number of sequences, and images.

    A single sequence that continues an ended one has the keys and values of its first tokens, see :meth:`Batch.past`.
    """

    index: int
    tokens: list[int]
    limit: int
    num_samples: int = 1
    images: Mapping[str, Any] = field(default_factory=dict)
    past: Past | None = None

    @property
    def offset(self) -> int:
        """Position minus index of new tokens."""
        images = self.images.get("encoder_input", {}).get("images")
        return images.offset if isinstance(images, Images) else 0

    @property
    def images_end(self) -> int:
        """Number of tokens up to the last token of an image."""
        images = self.images.get("encoder_input", {}).get("images")
        return int(images.places.max()) + 1 if isinstance(images, Images) else 0


@dataclass
class Row:
    """A running sequence: index, column of its first token, number of new tokens, and maximum number of them.

    ``images`` belong to its prompt, and ``offset`` is position minus index of its new tokens.
    """

    index: int
    start: int
    count: int
    limit: int
    images: Mapping[str, Any]
    offset: int


def _takes_prompts_in_a_row(model: nn.Module) -> bool:
    """Return whether a step depends on earlier ones only through keys and values: no recurrence, no encoder output."""
    if not isinstance(model, TransformerDecoder | ImageTextModel):
        return False
    return not (model.text.attends_to_encoder() or model.text.has_states())


class ModelRanks:
    """The ranks that share the model. As a context manager, it reshards FSDP parameters on exit."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups: list[dist.ProcessGroup] = []
        self._tp: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        from torchtune.modules.parallel import ContextParallelAttention

        if any(isinstance(m, ContextParallelAttention) for m in (a.attention for a in attention_modules(model))):
            raise GenerationError("Generation does not support context parallelism: set context_parallel_dim to 1.")
        reshard(model)
        meshes = [parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")]
        if meshes:
            mesh = max(meshes, key=lambda mesh: mesh.ndim)
            names = mesh.mesh_dim_names or ("",) * mesh.ndim
            self._groups = [mesh.get_group(index) for index, name in enumerate(names) if name != "tp"]
            self._tp = mesh["tp"].get_group() if "tp" in names else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        reshard(self._model)  # all-gathered parameters would be stale after the next optimizer step

    def multiple(self, length: int) -> int:
        """Return ``length`` rounded up to a multiple of the sequence-parallel size."""
        return length if self._tp is None else length + -length % self._tp.size()

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank that must run the same forward passes."""
        for group in self._groups:
            flag = any_rank(flag, group)
        return flag

    def agree(self, drawn: Tensor) -> Tensor:
        """Broadcast the samples of the tensor-parallel group's first rank."""
        if self._tp is not None:
            dist.broadcast(drawn, group=self._tp, group_src=0)
        return drawn


class Batch:
    """Running sequences, aligned at their ends.

    The last known token of every row is in column ``end - 1``, so that a step writes one column of all KV caches.
    Attention reads the columns from the earliest start on, without a mask if all rows start there. Columns are
    independent of positions: a row that joins is prefilled into the columns before ``end - 1``. Prompts of different
    lengths are prefilled padding-free, in one row, if the model supports it.

    Args:
        model: the decoder, without KV caches.
        requests: prompts and limits, in the order of generation.
        size: number of rows.
        ranks: the ranks that share the model.
        device: device of the tokens.
        use_cache: use KV caches; without them every step runs the model on whole sequences.
        step: runs the model on one position per row after the cached positions; by default as it runs on prompts.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        requests: Sequence[Request],
        size: int,
        ranks: ModelRanks,
        device: torch.device,
        use_cache: bool,
        step: Step | None = None,
    ) -> None:
        self._model, self._ranks, self._device, self._use_cache = model, ranks, device, use_cache
        self._step = step
        self._packs = ranks.multiple(1) == 1 and _takes_prompts_in_a_row(model)
        self._waiting = deque(requests)
        self._added: deque[Request] = deque()
        self._size = size
        self._rows: list[Row] = []
        self._ended: set[int] = set()  # rows that leave before the next step
        self._end = 0
        self._place = Place()
        self._tokens = torch.zeros(size, 0, dtype=torch.int64, device=device)
        self._starts = self._offsets = torch.zeros(0, dtype=torch.int64, device=device)
        self._caches: list[KVCache] = []

    @property
    def is_unfinished(self) -> bool:
        """Whether a sequence is running or waiting."""
        return bool(len(self._rows) > len(self._ended) or self._waiting or self._added)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue more prompts, ahead of the prompts that wait from the start."""
        self._added.extend(requests)

    def past(self, index: int) -> Past | None:
        """Copy the keys and values of a sequence that ended in the last step, except for its last token.

        Returns:
            ``None`` if a sequence cannot be continued from keys and values.
        """
        if not (self._packs and self._caches):
            return None
        row = next(row for row in self._ended if self._rows[row].index == index)
        return [cache.read(row, self._rows[row].start, self._end - 1) for cache in self._caches]

    def forward(self) -> tuple[Tensor, list[Row]]:
        """Run the model once.

        Returns:
            Logits of the next token, float32 ``[m, v]``, and their rows. The rows are empty if all sequences have
            ended, and the model only ran for the collectives of other ranks.
        """
        if self._ended:
            self._leave(self._ended)
            self._ended = set()
        newcomers = self._newcomers()
        if newcomers:
            return self._prefill(newcomers)
        if not self._rows:
            self._fit(1, 1)
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            return self._run(tokens, tokens, None, None, Place()), []
        self._fit(0, max(row.limit - row.count for row in self._rows))
        first, count = min(row.start for row in self._rows), len(self._rows)
        input_pos = (self._end - 1 - self._starts + self._offsets)[:, None]
        if not self._use_cache or self._model.invalidates_caches(input_pos):
            return self._whole(0, first, self._end), list(self._rows)
        mask = None
        if any(row.start != first for row in self._rows):
            mask = (torch.arange(first, self._end, device=self._device) >= self._starts[:, None])[:, None]
        x = self._tokens[:count, self._end - 1 : self._end]
        images = {}
        if masked := [row.images for row in self._rows if "encoder_mask" in row.images]:  # the caches have the images
            images = {"encoder_mask": masked[0]["encoder_mask"][:, -1:]}
        logits = self._run(x, input_pos, mask, None, Place(0, first, self._end - 1), images=images)
        return logits, list(self._rows)

    def sequences(self, rows: list[Row]) -> list[Tensor]:
        """Return prompt and new tokens, int64 ``[s]``, of each row of :meth:`forward`, before :meth:`append`."""
        first = len(self._rows) - len(rows)
        end = self._end if rows[0].count else self._end - 1  # the column of the first token after a prompt is empty
        return [self._tokens[index, row.start : end] for index, row in enumerate(rows, first)]

    def append(self, rows: list[Row], drawn: Tensor, ends: Callable[[int, int], bool]) -> None:
        """Append the tokens ``[m, 1]`` to the rows of :meth:`forward`; rows that end leave before the next step.

        Args:
            rows: rows of :meth:`forward`.
            drawn: their next tokens.
            ends: takes the index of a sequence and its new token; True ends the sequence.
        """
        count = len(self._rows)
        if rows[0].count:  # the column of the first token after a prompt exists already
            self._end += 1
        self._tokens[count - len(rows) : count, self._end - 1 : self._end] = drawn
        for index, (row, token) in enumerate(zip(rows, drawn[:, 0].tolist(), strict=True), count - len(rows)):
            row.count += 1
            if ends(row.index, token) or row.count == row.limit:
                self._ended.add(index)

    def _newcomers(self) -> list[Request]:
        """Return requests for free rows; none while few rows are free, because a prefill delays the others."""
        free = self._size - len(self._rows)
        if self._rows and free < self._size / 4:
            return []
        found, waiting = [], self._added or self._waiting
        while waiting and waiting[0].num_samples <= free:
            if any("encoder_mask" in one.images for one in [waiting[0], *found, *self._rows]) and (found or self._rows):
                break  # caches of an encoder hold one prompt
            found.append(waiting.popleft())
            free -= found[-1].num_samples
        return found

    def _prefill(self, newcomers: list[Request]) -> tuple[Tensor, list[Row]]:
        count, longest = len(self._rows), max(len(request.tokens) for request in newcomers)
        room = max(request.limit for request in newcomers)
        if not self._rows:
            self._end = 0
        self._fit(longest + 1, max([room, *(row.limit - row.count for row in self._rows)]))
        stop = self._end - 1
        rows = [Row(one.index, stop - len(one.tokens), 0, one.limit, one.images, one.offset) for one in newcomers]
        for index, request in enumerate(newcomers, count):
            known = to_device(request.tokens, self._device)
            self._tokens[index, stop - longest : stop - len(known)] = 0
            self._tokens[index, stop - len(known) : stop] = known
        self._set_rows(self._rows + rows)
        logits = self._after_past(newcomers, stop)
        logits = self._whole(count, stop - longest, stop) if logits is None else logits
        samples = [request.num_samples for request in newcomers]
        if max(samples) > 1:
            source = torch.arange(len(rows), device=self._device)
            counts = to_device(samples, self._device)
            source = source.repeat_interleave(counts, output_size=sum(samples))
            logits = logits[source]
            self._copy_rows(source + count, torch.arange(len(source), device=self._device) + count)
            rows = [
                replace(row, index=row.index + sample)
                for row, number in zip(rows, samples, strict=True)
                for sample in range(number)
            ]
            self._set_rows(self._rows[:count] + rows)
        return logits, rows

    def _after_past(self, newcomers: list[Request], stop: int) -> Tensor | None:
        """Return logits ``[m, v]`` after new rows, reusing known keys and values of their first tokens.

        All rows run the same number of last columns, even if some are known, so that no row has padding.

        Returns:
            ``None`` if this takes as many tokens as running the whole rows, or is not possible.
        """
        known = [request.past[0][0].shape[1] if request.past else 0 for request in newcomers]
        lengths = [len(request.tokens) for request in newcomers]
        new = max(length - past for length, past in zip(lengths, known, strict=True))
        count = len(self._rows) - len(newcomers)
        columns = torch.arange(stop - new, stop, device=self._device)
        starts = self._starts[count:, None]
        input_pos = columns - starts + self._offsets[count:, None]
        if new * len(newcomers) >= sum(lengths) or min(lengths) < new or self._model.invalidates_caches(input_pos):
            return None
        if any(len(request.tokens) - new < request.images_end for request in newcomers):  # images are encoded elsewhere
            return None
        for row, request in enumerate(newcomers, count):
            for cache, past in zip(self._caches, request.past or [], strict=False):
                cache.write(row, self._rows[row].start, *past)
        first = stop - max(lengths)
        keys = torch.arange(first, stop, device=self._device)
        mask = (keys >= starts[..., None]) & (keys <= columns[:, None])
        return self._run(
            self._tokens[count : len(self._rows), columns], input_pos, mask, None, Place(count, first, stop - new)
        )

    def _whole(self, row: int, first: int, end: int) -> Tensor:
        """Return logits ``[m, v]`` after the columns ``first`` to ``end`` of all rows from ``row`` on."""
        lengths = [end - one.start for one in self._rows[row:]]
        if self._packs and min(lengths) < max(lengths):
            return self._without_padding(row, lengths, end)
        tokens = self._tokens[row : len(self._rows), first:end]
        input_pos = (torch.arange(first, end, device=self._device) - self._starts[row:, None]).clamp(min=0)
        documents = None
        padding = [one.start - first for one in self._rows[row:]]
        if max(padding):  # padding is a separate document: no mask
            more = self._ranks.multiple(end - first) - (end - first)
            parts = zip(padding, [length + more for length in lengths], strict=True)
            documents = Documents.from_lengths([part for pair in parts for part in pair if part], tokens.device)
        given = [images for one in self._rows[row:] for images in ({}, one.images)]
        parts = [part for pair in zip(padding, lengths, strict=True) for part in pair]
        images = images_of_batch(given, parts, input_pos)
        return self._run(tokens, input_pos, None, documents, Place(row, first, first), images=images)

    def _without_padding(self, row: int, lengths: list[int], end: int) -> Tensor:
        """Return logits ``[m, v]`` after the columns before ``end`` of all rows from ``row`` on, packed in one row."""
        documents = Documents.from_lengths(lengths, self._device)
        positions = documents.positions()
        rows = row + documents.document_ids()
        columns = self._starts[rows] + positions
        place = Place(row, end, end, rows, columns)
        last = documents.cu_seqlens[1:].long() - 1
        images = images_of_batch([one.images for one in self._rows[row:]], lengths, positions[None])
        tokens = self._tokens[rows, columns][None]
        return self._run(tokens, positions[None], None, documents, place, last, images)

    def _run(
        self,
        x: Tensor,
        input_pos: Tensor,
        mask: Tensor | None,
        documents: Documents | None,
        place: Place,
        last: Tensor | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return float32 logits ``[m, v]`` after the last position of each sequence.

        Args:
            x: tokens ``[m, s]``.
            input_pos: positions ``[m, s]``.
            mask: bool ``[m, 1, t]``, for a single position.
            documents: padding and tokens of each row; by default no row has padding.
            place: place of the new keys and values in the KV caches.
            last: indices ``[m]`` of last positions, if ``x`` ``[1, s]`` is a packed row.
            images: arguments of the model's forward for images.
        """
        s = x.shape[1]
        missing = self._ranks.multiple(s) - s
        if missing:  # sequence parallelism: pad on the right to a multiple; causal attention ignores it
            x, input_pos = F.pad(x, (0, missing)), F.pad(input_pos, (0, missing))
            if place.first < place.end:
                mask = x.new_ones(len(x), 1, place.end + 1 - place.first, dtype=torch.bool) if mask is None else mask
                mask = F.pad(mask, (0, missing)).expand(-1, x.shape[1], -1)
        self._place.__dict__.update(vars(place))
        if self._step is not None and place.first < place.end:
            return self._step(x, input_pos, mask)
        hidden = self._model(x, input_pos=input_pos, mask=mask, documents=documents, output="hidden", **(images or {}))
        hidden = hidden[-1] if text_decoder(self._model).output_hidden_states else hidden
        hidden = hidden[:, s - 1 : s] if last is None else hidden[0, last, None]
        return self._model.output(hidden).float()[:, 0]

    def _set_rows(self, rows: list[Row]) -> None:
        self._rows = rows
        starts = to_device([(row.start, row.offset) for row in rows], self._device, torch.int64)
        self._starts, self._offsets = starts.view(-1, 2).unbind(1)

    def _leave(self, ended: set[int]) -> None:
        """Remove rows, and fill the gaps with the last rows, so that few rows move."""
        kept = [index for index in range(len(self._rows)) if index not in ended]
        holes = [index for index in range(len(kept)) if index in ended]
        order = list(range(len(kept)))
        movers = kept[len(kept) - len(holes) :]
        if holes:
            self._copy_rows(to_device(movers, self._device), to_device(holes, self._device))
            for hole, mover in zip(holes, movers, strict=True):
                order[hole] = mover
        self._set_rows([self._rows[index] for index in order])

    def _copy_rows(self, source: Tensor, target: Tensor) -> None:
        first = min(row.start for row in self._rows)
        self._tokens[target] = self._tokens[source]
        for cache in self._caches:
            cache.copy_rows(source, target, first, self._end)

    def _fit(self, end: int, room: int) -> None:
        """Make the rows end at column ``end`` or later, with a free column after it.

        Args:
            end: columns needed for the prompts of new rows.
            room: maximum number of tokens that a row may still get, which limits the allocation.
        """
        first = min((row.start for row in self._rows), default=self._end)
        span, columns = self._end - first, self._tokens.shape[1]
        spare = self._ranks.multiple(1)
        if self._end >= end and self._end + spare <= columns:
            return
        end = max(end, span)
        if end + min(room, 16) + spare > columns:
            columns = end + min(room, max(64, end // 2)) + spare
        moved = self._tokens[:, first : self._end]
        self._tokens = F.pad(moved, (end - span, columns - end))
        if self._use_cache and not self._caches:
            self._make_caches(columns)
        for cache in self._caches:
            cache.move(first, self._end, end - span, columns)
        self._end = end
        for row in self._rows:
            row.start += end - span - first
        self._set_rows(self._rows)

    def _make_caches(self, columns: int) -> None:
        with self._device:
            self._model.setup_caches(self._size, self._model.tok_embeddings.weight.dtype, decoder_max_seq_len=columns)
        kept = (module.kv_cache for module in attention_modules(self._model))
        self._caches = [cache for cache in kept if cache is not None and not isinstance(cache, EncoderCache)]
        for cache in self._caches:
            cache.place = self._place


# Minimum number of new tokens for which converting weights to oneDNN's layout and back saves time.
_WORTH_PACKING = 32


def check_generates(model: nn.Module) -> None:
    """Check that a model is one of a language.

    Args:
        model: a decoder, or a model of text and images.

    Raises:
        GenerationError: it is a classifier or a reward model, whose outputs are no tokens.

    Example:
        >>> torchtune.generation.check_generates(model)  # raises for a reward model
    """
    if getattr(getattr(text_decoder(model), "description", None), "is_classifier", False):
        raise GenerationError(
            "model: it is a classifier or a reward model, which gives scores and no text: give a language model."
        )


def decode(
    model: TransformerDecoder,
    requests: Sequence[Request],
    *,
    size: int,
    device: torch.device,
    use_cache: bool,
    draw: Callable[[Tensor, list[Row]], tuple[Tensor, Tensor]],
    ends: Callable[[int, int], bool],
    processors: Callable[[int], Sequence[LogitsProcessor]] | None = None,
    step: Step | None = None,
    more: Callable[[Batch], Sequence[Request]] | None = None,
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Generate in a continuous batch; the model is restored when the iterator ends, is closed or raises.

    Args:
        model: the decoder.
        requests: prompts and limits, in the order of generation.
        size: number of rows of the batch.
        device: device of the tokens.
        use_cache: use KV caches.
        draw: takes logits ``[m, v]`` of the next token and their rows; returns tokens int64 ``[m, 1]`` and a tensor
            to yield with them.
        ends: takes the index of a sequence and its new token; True ends the sequence.
        processors: takes the index of a sequence; returns its logits processors.
        step: see :class:`Batch`.
        more: called with the batch after every step; returns further prompts. Generation ends when it returns none and
            the batch is finished.

    Yields:
        Indices of the unfinished sequences, their next tokens ``[m, 1]`` and the second tensor of ``draw``.
    """
    check_generates(model)
    ranks = ModelRanks(model)
    pack = use_cache and max(request.limit for request in requests) >= _WORTH_PACKING
    with ranks, evaluating(model), fast_linears(model, pack=pack), _without_caches(model):
        batch = Batch(model, requests, size, ranks, device, use_cache, step)
        while True:
            logits, rows = batch.forward()
            if rows:
                if processors is not None:
                    logits = _process(logits, batch, rows, processors)
                tokens, values = draw(logits, rows)
                tokens = ranks.agree(tokens)
                indices = [row.index for row in rows]
                batch.append(rows, tokens, ends)
                yield indices, tokens, values
            if more is not None:
                batch.add(more(batch))
            if not ranks.any(batch.is_unfinished):
                return


def _process(
    logits: Tensor, batch: Batch, rows: list[Row], processors: Callable[[int], Sequence[LogitsProcessor]]
) -> Tensor:
    """Return logits ``[m, v]`` after the logits processors of each sequence."""
    chains = [processors(row.index) for row in rows]
    if not any(chains):
        return logits
    sequences = batch.sequences(rows)
    processed = [
        process_logits(tokens[None], row_logits, chain)
        for tokens, row_logits, chain in zip(sequences, logits.split(1), chains, strict=True)
    ]
    return torch.cat(processed)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode; restores the training mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _without_caches(model: TransformerDecoder) -> Iterator[None]:
    """Context manager that removes the model's KV caches and restores them on exit."""
    attentions = attention_modules(model)
    before = [(module, module.kv_cache, module.cache_enabled) for module in attentions]
    decoder = text_decoder(model)
    lengths = decoder.encoder_max_cache_seq_len, decoder.decoder_max_cache_seq_len
    for module in attentions:
        module.kv_cache, module.cache_enabled = None, False
    try:
        yield
    finally:
        for module, cache, enabled in before:
            module.kv_cache, module.cache_enabled = cache, enabled
        decoder.encoder_max_cache_seq_len, decoder.decoder_max_cache_seq_len = lengths
