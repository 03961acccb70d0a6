"""The decode loop: a continuous batch with key-value caches, in which rows join and leave while others continue."""

import os
from collections import Counter, deque
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
from torchtune.modules.kv_cache import EncoderCache, KVCache, Place, attention_modules
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.transformer import TransformerDecoder, is_causal, text_decoder
from torchtune.training.parallel import any_rank, lowest_of_ranks, reshard
from torchtune.utils import get_logger, log_once, to_device

# (tokens [m, 1], positions [m, 1], mask [m, 1, t] or None) -> logits [m, v]
Step = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# Keys and values [n_kv, s, hd] of each KV cache.
Past = list[tuple[Tensor, Tensor]]
# A step: indices of the sequences that had not ended before it, their next tokens [m, 1], and a tensor [m, ...].
SampledStep = tuple[list[int], Tensor, Tensor]


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
        if not isinstance(images, Images):
            return 0
        return images.offset

    @property
    def images_end(self) -> int:
        """Number of tokens up to the last token of an image."""
        images = self.images.get("encoder_input", {}).get("images")
        if not isinstance(images, Images):
            return 0
        return int(images.places.max()) + 1


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


def _reads_only_keys_and_values(model: nn.Module) -> bool:
    """Return whether a step depends on earlier ones only through keys and values: no recurrence, no encoder output."""
    if not isinstance(model, TransformerDecoder | ImageTextModel):
        return False
    return not (model.text.attends_to_encoder() or model.text.has_states())


def _has_static_steps(model: nn.Module) -> bool:
    """Return whether a step of the model has the same shapes for texts of any length."""
    if not isinstance(model, TransformerDecoder) or not _reads_only_keys_and_values(model):
        return False
    for attention in attention_modules(model):
        embedding = getattr(attention, "pos_embeddings", None)
        if getattr(embedding, "depends_on_length", False):
            return False
    return not model.output_hidden_states


class ModelRanks:
    """The ranks that share the model. As a context manager, it reshards FSDP parameters on exit."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups: list[dist.ProcessGroup] = []
        self._tp: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        from torchtune.modules.parallel import shards_sequences

        if shards_sequences(model):
            raise GenerationError(
                "Generation does not support parts of sequences: set context_parallel_dim to 1, and for a model with "
                "linear attention, Mamba or convolutions tensor_parallel_dim."
            )
        reshard(model)  # all-gathered parameters are plain tensors, without a mesh
        meshes = [parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")]
        if meshes:
            # Parameters may live on submeshes, for example those of experts; the largest mesh has every dimension.
            mesh = max(meshes, key=lambda mesh: mesh.ndim)
            names = mesh.mesh_dim_names or ("",) * mesh.ndim
            for index, name in enumerate(names):
                if name == "tp":
                    self._tp = mesh.get_group(index)
                else:
                    self._groups.append(mesh.get_group(index))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        reshard(self._model)  # all-gathered parameters would be stale after the next optimizer step

    @property
    def is_single(self) -> bool:
        """Whether no other rank shares the model."""
        return not self._groups and self._tp is None

    def padded_length(self, length: int) -> int:
        """Return ``length`` rounded up to a multiple of the sequence-parallel size."""
        if self._tp is None:
            return length
        return length + -length % self._tp.size()

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank that must run the same forward passes."""
        for group in self._groups:
            flag = any_rank(flag, group)
        return flag

    def lowest(self, count: int) -> int:
        """Return the lowest ``count`` of the ranks that must run the same forward passes."""
        for group in self._groups:
            count = lowest_of_ranks(count, group)
        return count

    def broadcast_samples(self, tokens: Tensor) -> Tensor:
        """Broadcast the samples of the tensor-parallel group's first rank."""
        # The ranks of the group have the same logits, but each its own random generator.
        if self._tp is not None:
            dist.broadcast(tokens, group=self._tp, group_src=0)
        return tokens


class StaticStep:
    """A step with static shapes, which CUDA replays as one graph.

    It runs one token of every row of a batch; no shape depends on the rows, on their lengths, or on the column.

    All rows of the caches run, rows without a sequence too, and attention masks all columns of the caches. On CUDA the
    launches of a step are captured once and replayed for every token, until the caches grow. Where they cannot be
    captured, one line says so, and :attr:`is_usable` becomes False.

    Args:
        model: the decoder, whose caches have the place ``place``.
        caches: KV caches of all layers.
        place: place in all caches; set here.
        captures: capture a CUDA graph; by default on CUDA.
    """

    def __init__(
        self, model: TransformerDecoder, caches: list[KVCache], place: Place, captures: bool | None = None
    ) -> None:
        self._model = model
        self._caches = caches
        self._place = place
        cache = caches[0].k_cache  # [size, n_kv, columns, h]
        size = cache.shape[0]
        device = cache.device
        self._captures = device.type == "cuda" if captures is None else captures
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured_columns = 0
        self.is_usable = True
        # Inputs and output of the graph, at fixed addresses.
        self._tokens = torch.zeros(size, 1, dtype=torch.int64, device=device)
        self._starts = torch.zeros(size, dtype=torch.int64, device=device)  # columns of first tokens
        self._offsets = torch.zeros(size, dtype=torch.int64, device=device)  # position minus index
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None  # [size, v]

    def set_inputs(self, tokens: Tensor, starts: Tensor, offsets: Tensor, column: int) -> None:
        """Copy the inputs of a step; the host waits for nothing.

        Args:
            tokens: last tokens of the rows, int64 ``[m, 1]``.
            starts: columns of their first tokens, int64 ``[m]``.
            offsets: positions minus indices of their new tokens, int64 ``[m]``.
            column: column of the last tokens.
        """
        count = len(tokens)
        self._tokens[:count] = tokens
        self._starts[:count] = starts
        self._offsets[:count] = offsets
        self._column.fill_(column)

    def run(self, count: int) -> Tensor | None:
        """Return float32 logits ``[m, v]`` of the first ``count`` rows; None if the step cannot be captured."""
        columns = self._caches[0].k_cache.shape[2]
        if not self._captures:
            logits = self.compute()
        else:
            if self._graph is None or self._captured_columns != columns:
                self._capture()
                self._captured_columns = columns
            if self._graph is None:
                return None
            self._graph.replay()
            logits = self._logits
        return logits[:count].clone()  # the next step overwrites them

    def compute(self) -> Tensor:
        """Run the model on the inputs; returns float32 logits ``[size, v]``."""
        # Updated in place, because every cache holds this object.
        self._place.__dict__.update(vars(Place(column=self._column)))
        columns = torch.arange(self._caches[0].k_cache.shape[2], device=self._column.device)
        # Rows without a sequence start at column 0: a row that sees no column would be NaN.
        mask = (columns >= self._starts[:, None]) & (columns <= self._column)  # [size, columns]
        positions = (self._column - self._starts + self._offsets)[:, None]  # [size, 1]
        hidden = self._model(self._tokens, input_pos=positions, mask=mask[:, None], output="hidden")  # [size, 1, d]
        return self._model.output(hidden).float()[:, 0]

    def _capture(self) -> None:
        """Capture :meth:`compute` as a graph."""
        self._graph = None
        self._logits = None
        try:
            # What the first run allocates, compiles or copies must not be part of the graph.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._logits = self.compute()
            self._graph = graph
        except RuntimeError as error:
            self.is_usable = False
            reason = str(error).partition("\n")[0]
            log_once(
                get_logger(), f"Decoding launches every kernel by itself: CUDA captures no graph of it ({reason})."
            )


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
        is_static: run these positions with static shapes (:class:`StaticStep`), where the model can.
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
        is_static: bool = False,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._device = device
        self._use_cache = use_cache
        self._step = step
        # Prompts of different lengths share a row, except with sequence parallelism, which pads rows.
        self._packs = ranks.padded_length(1) == 1 and _reads_only_keys_and_values(model)
        self._waiting = deque(requests)
        self._added: deque[Request] = deque()
        self._size = size
        self._rows: list[Row] = []
        self._unread: list[tuple[list[Row], Tensor, Tensor]] = []  # steps whose tokens the host has not seen
        self._ended: dict[int, int] = {}  # slot of a row that leaves before the next step -> number of its tokens
        self._end = 0
        self._cache_place = Place()  # all caches share it: _run says once where a step writes
        self._tokens = torch.zeros(size, 0, dtype=torch.int64, device=device)  # [size, columns]
        self._starts = torch.zeros(0, dtype=torch.int64, device=device)  # [m], columns of first tokens
        self._offsets = self._starts  # [m], positions minus indices of new tokens
        self._caches: list[KVCache] = []
        self._is_static = is_static and use_cache and step is None and ranks.is_single and _has_static_steps(model)
        self._static_step: StaticStep | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether a sequence is running or waiting."""
        return bool(len(self._rows) > len(self._ended) or self._waiting or self._added)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue more prompts, ahead of the prompts that wait from the start."""
        self._added.extend(requests)

    def passes_without_check(self) -> int | None:
        """Number of forward passes after which a sequence may be at its limit; None if this rank has no sequence."""
        tokens_left = [request.limit for request in (*self._added, *self._waiting)]
        for slot, row in enumerate(self._rows):
            if slot not in self._ended:
                tokens_left.append(row.limit - row.count)
        return min(tokens_left, default=None)

    def past(self, index: int) -> Past | None:
        """Copy the keys and values of a sequence that ended in the last :meth:`check`, except for its last token.

        Returns:
            ``None`` if a sequence cannot be continued from keys and values.
        """
        if not (self._packs and self._caches):
            return None
        slot = next(slot for slot in self._ended if self._rows[slot].index == index)
        start = self._rows[slot].start
        end = start + self._ended[slot]
        return [cache.read(slot, start, end - 1) for cache in self._caches]

    def forward(self) -> tuple[Tensor, list[Row]]:
        """Run the model once.

        Returns:
            Logits of the next token, float32 ``[m, v]``, and their rows. The rows are empty if all sequences have
            ended, and the model only ran for the collectives of other ranks.
        """
        if self._ended:
            self._leave(set(self._ended))
            self._ended = {}
        newcomers = self._newcomers()
        if newcomers:  # a pass for them alone: the running rows go on in the next one
            return self._prefill(newcomers)
        if not self._rows:
            # This rank is finished and others are not: run one token for the collectives.
            self._make_room(1, 1)
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            return self._run(tokens, tokens, None, None, Place()), []
        self._make_room(0, max(row.limit - row.count for row in self._rows))
        first = min(row.start for row in self._rows)
        # On the host, which would wait for positions on the device.
        positions = [self._end - 1 - row.start + row.offset for row in self._rows]
        host_positions = torch.tensor(positions, device="cpu")[:, None]  # [m, 1]
        # Some RoPE scaling changes with the length, and with it the keys of earlier positions.
        if not self._use_cache or self._model.invalidates_caches(host_positions):
            return self._run_whole(0, first, self._end), list(self._rows)
        if self._is_static:
            logits = self._run_static()
            if logits is not None:
                return logits, list(self._rows)

        # One position per row, after the cached ones.
        count = len(self._rows)
        input_pos = (self._end - 1 - self._starts + self._offsets)[:, None]  # [m, 1]
        mask = None
        if any(row.start != first for row in self._rows):
            columns = torch.arange(first, self._end, device=self._device)
            mask = (columns >= self._starts[:, None])[:, None]  # [m, t] -> [m, 1, t]
        x = self._tokens[:count, self._end - 1 : self._end]  # [m, 1]
        images = {}
        for row in self._rows:
            # The caches of the encoder have the images of one prompt; new tokens use the mask of its last token.
            if "encoder_mask" in row.images:
                images = {"encoder_mask": row.images["encoder_mask"][:, -1:]}
                break
        cache_place = Place(0, first, self._end - 1)
        logits = self._run(x, input_pos, mask, None, cache_place, images=images)
        return logits, list(self._rows)

    def _run_static(self) -> Tensor | None:
        """Return logits ``[m, v]`` of a step with static shapes, or None if it cannot be captured."""
        if self._static_step is None:
            self._static_step = StaticStep(self._model, self._caches, self._cache_place)
        tokens = self._tokens[: len(self._rows), self._end - 1 : self._end]
        self._static_step.set_inputs(tokens, self._starts, self._offsets, self._end - 1)
        logits = self._static_step.run(len(self._rows))
        self._is_static = self._static_step.is_usable
        return logits

    def sequences(self, rows: list[Row]) -> list[Tensor]:
        """Return prompt and new tokens, int64 ``[s]``, of each row of :meth:`forward`, before :meth:`append`."""
        first = len(self._rows) - len(rows)
        end = self._end
        if rows[0].count == 0:  # the column of the first token after a prompt is empty
            end -= 1
        return [self._tokens[index, row.start : end] for index, row in enumerate(rows, first)]

    def append(self, rows: list[Row], tokens: Tensor, values: Tensor) -> None:
        """Append the tokens ``[m, 1]`` to the rows of :meth:`forward`, without a look at them.

        Args:
            rows: rows of :meth:`forward`.
            tokens: their next tokens.
            values: tensor ``[m, ...]`` that :meth:`check` returns with them.
        """
        count = len(self._rows)
        if rows[0].count:  # the column of the first token after a prompt exists already
            self._end += 1
        first = count - len(rows)  # new rows are the last ones
        self._tokens[first:count, self._end - 1 : self._end] = tokens
        for row in rows:
            row.count += 1
        self._unread.append((rows, tokens, values))

    def check(self, ends: Callable[[int, int], bool]) -> list[SampledStep]:
        """Read the tokens since the last check; rows that have ended leave before the next step.

        Here the host waits for the device, once.

        Args:
            ends: takes the index of a sequence and its new token; True ends the sequence.

        Returns:
            Each step since the last check, without the tokens that a row got after its end.
        """
        steps = self._unread
        self._unread = []
        if not steps:
            return []
        all_tokens = torch.cat([tokens[:, 0] for _, tokens, _ in steps])
        host_tokens = iter(all_tokens.tolist())
        num_unread: Counter[int] = Counter()  # index of a sequence -> number of its tokens that are not yet read
        for rows, _, _ in steps:
            num_unread.update(row.index for row in rows)
        slot_of_sequence = {row.index: slot for slot, row in enumerate(self._rows)}
        drawn = []
        for rows, tokens, values in steps:
            running = []  # of the rows of this step, those that had not ended before it
            for number, row in enumerate(rows):
                token = next(host_tokens)
                num_unread[row.index] -= 1
                slot = slot_of_sequence[row.index]
                if slot in self._ended:
                    continue
                running.append(number)
                # The row has got further tokens since this step, which are dropped if it ends here.
                num_later = num_unread[row.index]
                if ends(row.index, token) or row.count - num_later == row.limit:
                    self._ended[slot] = self._end - row.start - num_later
            if 0 < len(running) < len(rows):
                selected = to_device(running, self._device)
                tokens = tokens.index_select(0, selected)
                values = values.index_select(0, selected)
            if running:
                indices = [rows[number].index for number in running]
                drawn.append((indices, tokens, values))
        return drawn

    def _newcomers(self) -> list[Request]:
        """Return requests for free rows; none while few rows are free, because a prefill delays the others."""
        free = self._size - len(self._rows)
        if self._rows and free < self._size / 4:
            return []
        newcomers: list[Request] = []
        waiting = self._added or self._waiting  # prompts of the two queues never join in one prefill
        while waiting and waiting[0].num_samples <= free:
            batch = [*newcomers, *self._rows]
            if batch and any("encoder_mask" in prompt.images for prompt in [waiting[0], *batch]):
                break  # caches of an encoder hold one prompt
            newcomers.append(waiting.popleft())
            free -= newcomers[-1].num_samples
        return newcomers

    def _prefill(self, newcomers: list[Request]) -> tuple[Tensor, list[Row]]:
        """Run the model on new prompts, which join behind the running rows; returns as :meth:`forward`."""
        count = len(self._rows)
        longest = max(len(request.tokens) for request in newcomers)
        if count == 0:  # no row needs the columns so far
            self._end = 0
        room = max(request.limit for request in newcomers)
        for row in self._rows:
            room = max(room, row.limit - row.count)
        self._make_room(longest + 1, room)
        stop = self._end - 1  # the last column stays free for the first new token
        rows = []
        for index, request in enumerate(newcomers, count):
            start = stop - len(request.tokens)
            self._tokens[index, stop - longest : start] = 0  # padding must be valid token ids
            self._tokens[index, start:stop] = to_device(request.tokens, self._device)
            rows.append(Row(request.index, start, 0, request.limit, request.images, request.offset))
        self._set_rows(self._rows + rows)
        logits = self._prefill_after_past(newcomers, stop)
        if logits is None:
            logits = self._run_whole(count, stop - longest, stop)
        samples = [request.num_samples for request in newcomers]
        if max(samples) > 1:
            # A prompt is prefilled once; its samples start from copies of its keys and values.
            source = torch.arange(len(rows), device=self._device)
            counts = to_device(samples, self._device)
            source = source.repeat_interleave(counts, output_size=sum(samples))  # [prompts] -> [sequences]
            target = torch.arange(len(source), device=self._device)
            logits = logits[source]
            self._copy_rows(source + count, target + count)
            sample_rows = []
            for row, num_samples in zip(rows, samples, strict=True):
                for sample in range(num_samples):
                    sample_rows.append(replace(row, index=row.index + sample))
            rows = sample_rows
            self._set_rows(self._rows[:count] + rows)
        return logits, rows

    def _prefill_after_past(self, newcomers: list[Request], stop: int) -> Tensor | None:
        """Return logits ``[m, v]`` after new rows, reusing known keys and values of their first tokens.

        All rows run the same number of last columns, even if some are known, so that no row has padding.

        Returns:
            ``None`` if this takes as many tokens as running the whole rows, or is not possible.
        """
        lengths = [len(request.tokens) for request in newcomers]
        new = 0  # columns to run: the most tokens of a row without keys and values
        for request in newcomers:
            num_known = 0
            if request.past:
                first_layer_keys, _ = request.past[0]  # [n_kv, s, hd]
                num_known = first_layer_keys.shape[1]
            new = max(new, len(request.tokens) - num_known)
        num_earlier = len(self._rows) - len(newcomers)  # rows of the batch before the new ones
        columns = torch.arange(stop - new, stop, device=self._device)  # [new]
        starts = self._starts[num_earlier:, None]  # [m, 1]
        input_pos = columns - starts + self._offsets[num_earlier:, None]  # [m, new]
        saves_nothing = new * len(newcomers) >= sum(lengths)
        # A row with fewer tokens than columns to run would have padding; rotary angles that change make keys invalid.
        if saves_nothing or min(lengths) < new or self._model.invalidates_caches(input_pos):
            return None
        # This path runs text alone: an image whose tokens are among the new columns needs its encoder.
        if any(len(request.tokens) - new < request.images_end for request in newcomers):
            return None
        for row, request in enumerate(newcomers, num_earlier):
            for cache, past in zip(self._caches, request.past or [], strict=False):
                cache.write(row, self._rows[row].start, *past)
        first = stop - max(lengths)
        keys = torch.arange(first, stop, device=self._device)  # [t]
        mask = (keys >= starts[..., None]) & (keys <= columns[:, None])  # [m, 1, t] & [new, t] -> [m, new, t]
        x = self._tokens[num_earlier : len(self._rows), columns]  # [m, new]
        return self._run(x, input_pos, mask, None, Place(num_earlier, first, stop - new))

    def _run_whole(self, row: int, first: int, end: int) -> Tensor:
        """Return logits ``[m, v]`` after the columns ``first`` to ``end`` of all rows from ``row`` on."""
        lengths = [end - request_row.start for request_row in self._rows[row:]]
        if self._packs and min(lengths) < max(lengths):
            return self._run_packed(row, lengths, end)
        tokens = self._tokens[row : len(self._rows), first:end]  # [m, s]
        columns = torch.arange(first, end, device=self._device)  # [s]
        input_pos = (columns - self._starts[row:, None]).clamp(min=0)  # [m, s]
        documents = None
        has_padding = any(request_row.start > first for request_row in self._rows[row:])
        # Sequence parallelism pads each row on the right, see _run; the last document of a row includes this padding.
        right_padding = self._ranks.padded_length(end - first) - (end - first)
        document_lengths: list[int] = []
        segment_lengths: list[int] = []  # of padding and prompt of each row, as images_of_batch counts tokens
        segment_images: list[Mapping[str, Any]] = []
        for request_row, length in zip(self._rows[row:], lengths, strict=True):
            padding = request_row.start - first
            if padding:
                document_lengths.append(padding)
            document_lengths.append(length + right_padding)
            segment_lengths += [padding, length]
            segment_images += [{}, request_row.images]
        if has_padding:  # padding is a separate document: no mask
            documents = Documents.from_lengths(document_lengths, tokens.device)
        images = images_of_batch(segment_images, segment_lengths, input_pos)
        cache_place = Place(row, first, first)
        return self._run(tokens, input_pos, None, documents, cache_place, images=images)

    def _run_packed(self, row: int, lengths: list[int], end: int) -> Tensor:
        """Return logits ``[m, v]`` after the columns before ``end`` of all rows from ``row`` on, packed in one row."""
        documents = Documents.from_lengths(lengths, self._device)
        positions = documents.positions()  # [t]
        rows = row + documents.document_ids()  # [t]
        columns = self._starts[rows] + positions  # [t]
        cache_place = Place(row, end, end, rows, columns)
        last = documents.cu_seqlens[1:].long() - 1  # [m]
        row_images = [request_row.images for request_row in self._rows[row:]]
        images = images_of_batch(row_images, lengths, positions[None])
        tokens = self._tokens[rows, columns][None]  # [1, t]
        return self._run(tokens, positions[None], None, documents, cache_place, last, images)

    def _run(
        self,
        x: Tensor,
        input_pos: Tensor,
        mask: Tensor | None,
        documents: Documents | None,
        cache_place: Place,
        last: Tensor | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return float32 logits ``[m, v]`` after the last position of each sequence.

        Args:
            x: tokens ``[m, s]``.
            input_pos: positions ``[m, s]``.
            mask: bool ``[m, s, t]``, for positions after cached ones; by default causal.
            documents: padding and tokens of each row; by default no row has padding.
            cache_place: place of the new keys and values in the KV caches.
            last: indices ``[m]`` of last positions, if ``x`` ``[1, s]`` is a packed row.
            images: arguments of the model's forward for images.
        """
        s = x.shape[1]
        is_cached_step = cache_place.first < cache_place.end  # attention reads columns before those of x
        padding = self._ranks.padded_length(s) - s
        if padding:  # sequence parallelism: pad on the right to a multiple; causal attention ignores it
            x = F.pad(x, (0, padding))
            input_pos = F.pad(input_pos, (0, padding))
            if is_cached_step:
                if mask is None:
                    keys = cache_place.end + 1 - cache_place.first
                    mask = x.new_ones(len(x), 1, keys, dtype=torch.bool)
                mask = F.pad(mask, (0, padding))  # [m, 1, t + padding]
                mask = mask.expand(-1, x.shape[1], -1)  # [m, s, t + padding]
        # Updated in place, because every cache holds this object.
        self._cache_place.__dict__.update(vars(cache_place))
        if self._step is not None and is_cached_step:
            return self._step(x, input_pos, mask)
        if images is None:
            images = {}
        hidden = self._model(x, input_pos=input_pos, mask=mask, documents=documents, output="hidden", **images)
        if text_decoder(self._model).output_hidden_states:
            hidden = hidden[-1]
        if last is None:
            hidden = hidden[:, s - 1 : s]  # [m, s, d] -> [m, 1, d]
        else:
            hidden = hidden[0, last, None]  # [1, t, d] -> [m, 1, d]
        return self._model.output(hidden).float()[:, 0]  # [m, v]

    def _set_rows(self, rows: list[Row]) -> None:
        """Replace the rows, and copy their starts and offsets to the device."""
        self._rows = rows
        # One copy to the device for both columns.
        columns = [(row.start, row.offset) for row in rows]
        starts_and_offsets = to_device(columns, self._device, torch.int64)
        self._starts, self._offsets = starts_and_offsets.view(-1, 2).unbind(1)

    def _leave(self, ended: set[int]) -> None:
        """Remove rows, and fill the gaps with the last rows, so that few rows move."""
        running = [index for index in range(len(self._rows)) if index not in ended]
        holes = [index for index in range(len(running)) if index in ended]
        order = list(range(len(running)))
        movers = running[len(running) - len(holes) :]
        if holes:
            self._copy_rows(to_device(movers, self._device), to_device(holes, self._device))
            for hole, mover in zip(holes, movers, strict=True):
                order[hole] = mover
        self._set_rows([self._rows[index] for index in order])

    def _copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy tokens, keys and values of the rows ``source`` to the rows ``target``."""
        first = min(row.start for row in self._rows)
        self._tokens[target] = self._tokens[source]
        for cache in self._caches:
            cache.copy_rows(source, target, first, self._end)

    def _make_room(self, end: int, room: int) -> None:
        """Move the rows to end at column ``end`` or later, with a free column after it, and set up the caches once.

        Args:
            end: columns needed for the prompts of new rows.
            room: maximum number of tokens that a row may still get, which limits the allocation.
        """
        first = min((row.start for row in self._rows), default=self._end)
        span = self._end - first
        columns = self._tokens.shape[1]
        spare = self._ranks.padded_length(1)
        if self._end >= end and self._end + spare <= columns:
            return
        end = max(end, span)
        # Fewer than 16 free columns would soon be used up. The buffers grow by half, so that few steps reallocate.
        if end + min(room, 16) + spare > columns:
            columns = end + min(room, max(64, end // 2)) + spare
        window = self._tokens[:, first : self._end]  # [size, span]
        self._tokens = F.pad(window, (end - span, columns - end))  # [size, columns]
        if self._use_cache and not self._caches:
            with self._device:
                dtype = self._model.tok_embeddings.weight.dtype
                self._model.setup_caches(self._size, dtype, decoder_max_seq_len=columns)
            for module in attention_modules(self._model):
                cache = module.kv_cache
                if cache is not None and not isinstance(cache, EncoderCache):
                    cache.place = self._cache_place
                    self._caches.append(cache)
        for cache in self._caches:
            cache.move(first, self._end, end - span, columns)
        self._end = end
        for row in self._rows:
            row.start += end - span - first
        self._set_rows(self._rows)


# Minimum number of new tokens for which converting weights to oneDNN's layout and back saves time.
_WORTH_PACKING = 32
# Minimum number of new tokens for which a CUDA graph of a step saves time.
_WORTH_CAPTURING = 32


def check_generates(model: nn.Module) -> None:
    """Check that a model is a language model.

    Args:
        model: a decoder, or a model of text and images.

    Raises:
        GenerationError: it is a classifier or a reward model, whose outputs are not tokens, or it attends to later
            tokens.

    Example:
        >>> torchtune.generation.check_generates(model)  # raises for a reward model
    """
    description = getattr(text_decoder(model), "description", None)  # a user's model may lack it
    if description is not None and description.is_classifier:
        raise GenerationError(
            "model: it is a classifier or a reward model, which gives scores and no text: give a language model, or "
            "use torchtune.classify or tune eval."
        )
    if not is_causal(model):
        raise GenerationError(
            "model: it attends to later tokens, as an embedding model may, and so cannot predict them: use "
            "torchtune.embed, or give a language model."
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
    tokens_per_check: int = 1,
    processors: Callable[[int], Sequence[LogitsProcessor]] | None = None,
    step: Step | None = None,
    more: Callable[[Batch], Sequence[Request]] | None = None,
) -> Iterator[list[SampledStep]]:
    """Generate in a continuous batch; the model is restored when the iterator ends, is closed or raises.

    Args:
        model: the decoder.
        requests: prompts and limits, in the order of generation.
        size: number of rows of the batch.
        device: device of the tokens.
        use_cache: use KV caches.
        draw: takes logits ``[m, v]`` of the next token and their rows; returns tokens int64 ``[m, 1]`` and a tensor
            ``[m, ...]`` to yield with them.
        ends: takes the index of a sequence and its new token; True ends the sequence.
        tokens_per_check: maximum number of tokens after which the host reads them to see which sequences have ended,
            for which it waits for the device. Tokens after the end are not yielded.
        processors: takes the index of a sequence; returns its logits processors.
        step: see :class:`Batch`.
        more: called with the batch after every check; returns further prompts. Generation ends when it returns none
            and the batch is finished.

    Yields:
        The steps since the last check: indices of the unfinished sequences, their next tokens ``[m, 1]`` and the second
        tensor of ``draw``.
    """
    check_generates(model)
    ranks = ModelRanks(model)
    # Converting the weights to oneDNN's layout and back takes as long as 5 to 10 steps.
    pack = use_cache and max(request.limit for request in requests) >= _WORTH_PACKING
    with ranks, evaluating(model), fast_linears(model, pack=pack), _without_caches(model):
        # Only on request, because no GPU has run it. Capturing a graph takes as long as a few steps.
        is_static = device.type == "cuda" and os.environ.get("TORCHTUNE_CUDA_GRAPHS") == "1"
        is_static = is_static and max(request.limit for request in requests) >= _WORTH_CAPTURING
        batch = Batch(model, requests, size, ranks, device, use_cache, step, is_static)
        while True:
            passes = tokens_per_check
            if tokens_per_check > 1:
                # At its limit a sequence ends for certain, and makes room for others. All ranks run as many passes.
                passes_without_check = batch.passes_without_check()
                if passes_without_check is not None:  # None: this rank runs as many passes as the others
                    passes = min(passes, passes_without_check)
                passes = ranks.lowest(passes)
            for _ in range(passes):
                logits, rows = batch.forward()
                if rows:  # none if the model only ran for the collectives of other ranks
                    if processors is not None:
                        logits = _process(logits, batch, rows, processors)
                    tokens, values = draw(logits, rows)
                    batch.append(rows, ranks.broadcast_samples(tokens), values)
            drawn = batch.check(ends)
            if drawn:
                yield drawn
            if more is not None:
                batch.add(more(batch))
            # A rank without work goes on until all are finished, because FSDP gathers parameters on all ranks.
            if not ranks.any(batch.is_unfinished):
                return


def _process(
    logits: Tensor, batch: Batch, rows: list[Row], processors: Callable[[int], Sequence[LogitsProcessor]]
) -> Tensor:
    """Return logits ``[m, v]`` after the logits processors of each sequence."""
    chains = [processors(row.index) for row in rows]
    if not any(chains):
        return logits
    # One sequence at a time: a batch would need padding, which processors such as a penalty of repetitions would count.
    processed = []
    for tokens, row_logits, chain in zip(batch.sequences(rows), logits.split(1), chains, strict=True):
        processed.append(process_logits(tokens[None], row_logits, chain))  # [1, s], [1, v] -> [1, v]
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
    """Context manager that removes the caller's KV caches, and restores them and their lengths on exit.

    A :class:`Batch` sets up caches of its own size, and calls of the caller must find theirs as they were.
    """
    attentions = attention_modules(model)
    caches = [(module.kv_cache, module.cache_enabled) for module in attentions]
    decoder = text_decoder(model)
    encoder_length = decoder.encoder_max_cache_seq_len
    decoder_length = decoder.decoder_max_cache_seq_len
    for module in attentions:
        module.kv_cache = None
        module.cache_enabled = False
    try:
        yield
    finally:
        for module, (cache, is_enabled) in zip(attentions, caches, strict=True):
            module.kv_cache = cache
            module.cache_enabled = is_enabled
        decoder.encoder_max_cache_seq_len = encoder_length
        decoder.decoder_max_cache_seq_len = decoder_length
