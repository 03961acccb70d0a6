"""A step of a continuous batch with static shapes, which CUDA replays as one graph."""

import torch
from torch import Tensor

from torchtune.modules.kv_cache import KVCache, Place
from torchtune.modules.transformer import TransformerDecoder
from torchtune.utils import get_logger, log_once


class StaticStep:
    """Run one token of every row of a batch; no shape depends on the rows, on their lengths, or on the column.

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
