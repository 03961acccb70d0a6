"""What a simulated run has in the place of files: weights, rows, tokens and a log."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torchtune import config
from torchtune.modules.transformer import text_decoder
from torchtune.training.checkpointing._full_weights import FullWeights
from torchtune.training.checkpointing._load import initialize_rest
from torchtune.training.checkpointing._store import CheckpointStore
from torchtune.utils import UserError

# Called with every model that has its weights.
on_load: ContextVar[Callable[[nn.Module], None]] = ContextVar("on_load")
# Called before the first model gets its weights: from here on tensors are fake.
before_load: ContextVar[Callable[[], None]] = ContextVar("before_load")


class SimulationError(UserError):
    """A run that cannot be simulated."""


def shallow(model: Any, layers: int) -> nn.Module:
    """The first layers of a model (or of the one that a node describes), with what is before and after them."""
    model = model if isinstance(model, nn.Module) else config.instantiate(model)
    del text_decoder(model).layers[layers:]
    return model


class StandInCheckpointer(CheckpointStore):
    """Gives models weights without values, and saves nothing."""

    def __init__(self) -> None:
        super().__init__({})
        self.checkpoint_dir = Path()

    @property
    def store(self) -> "StandInCheckpointer":
        """Of checkpointers, what knows the sources."""
        return self

    def add_source(self, name: str, source: Any) -> None:
        """Any source will do."""

    def source(self, name: str = "policy") -> Any:
        """A folder without files, of weights of their own."""
        return SimpleNamespace(checkpoint_dir=self.checkpoint_dir, fingerprint=name)

    def load_model(
        self, model: nn.Module, *, device: Any = "cpu", dtype: torch.dtype | None = None, name: str = "policy"
    ) -> None:
        """Make every parameter of the meta device real, through the form in which conversions store it."""
        if text_decoder(model) is not model:
            raise UserError("model: a model of text and images cannot be simulated: use --dry-run.")
        before_load.get()()
        device, weights = torch.device("cpu"), FullWeights(model)
        for weight in sorted(weights.base):
            weights.fill(weight, lambda box, target: target.normal_(std=0.02), device, dtype)
        model.adapter_init = None
        initialize_rest(model, weights.base | weights.inside, device, dtype)
        on_load.get()(model)

    def check_model(self, model: nn.Module, *, name: str = "policy") -> None:
        """There are no files to compare with."""

    def check_output_dir(self, *, resume: bool) -> None:
        """Nothing is written."""

    def lock_output_dir(self) -> None:
        """Nothing is written."""

    def find_resume_point(self, cfg: Any = None) -> None:
        """There is none."""

    def save(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Nothing is open."""


class StandInTokenizer:
    """Knows how long rows are; tokenizes nothing."""

    vocab_size = 0  # fits every embedding
    pad_id = bos_id = eos_id = 0

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.stop_tokens = [0]
        self.special_tokens: dict[str, int] = {}


_COLUMNS = {
    "texts": ("tokens", "labels"),
    "answers": ("tokens", "labels"),
    "pairs": ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"),
}


class StandInDataset:
    """Rows of one length, every token of which carries a label.

    Args:
        tokenizer: not used.
        rows: how many.
        length: tokens of each.
        kind: what a row is: a text, or what a loss of preferences names as ``trains_on``.
    """

    def __init__(self, tokenizer: Any, *, rows: int, length: int, kind: str) -> None:
        self._rows, self._kind = rows, kind
        self._row = dict.fromkeys(_COLUMNS[kind], [0] * length)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _Row(self._row | ({"is_chosen": index % 2 == 0} if self._kind == "answers" else {}))


class _Row(dict[str, Any]):
    """Says what a collation asks for in vain."""

    def __missing__(self, name: str) -> Any:
        raise SimulationError(
            f"collate_fn: it reads '{name}' of a row, and those of a simulated run have {', '.join(self)} only: use "
            "--dry-run."
        )


class StandInLogger:
    """Logs nothing."""

    def log(self, name: str, data: Any, step: int) -> None:
        """Log nothing."""

    def log_config(self, config: Any) -> None:
        """Write nothing."""

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Log nothing."""

    def close(self) -> None:
        """Nothing is open."""
