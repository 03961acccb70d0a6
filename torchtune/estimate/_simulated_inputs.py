"""Stand-ins of a simulated run for checkpoints, tokenizers, datasets and loggers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints import CheckpointStore, materialize
from torchtune.data import ExampleDataset, Images
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.transformer import text_decoder
from torchtune.modules.vision_transformer import VisionTower
from torchtune.utils import UserError

# Called with each model after its weights are loaded.
on_load: ContextVar[Callable[[nn.Module], None]] = ContextVar("on_load")
# Converted models on the meta device, by the name of their setting.
built: ContextVar[Mapping[str, nn.Module]] = ContextVar("built")
# Description of the model, if its rows have images.
vision: ContextVar[Any] = ContextVar("vision", default=None)
# Called before the first model gets its weights; tensors are fake from then on.
before_load: ContextVar[Callable[[], None]] = ContextVar("before_load")


class SimulationError(UserError):
    """Raised if a run cannot be simulated."""


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that have ``layers``: its text decoder and its vision tower, by name."""
    modules = {"text": text_decoder(model)}
    if isinstance(model, ImageTextModel):
        modules["vision"] = model.encoder
    return {name: module for name, module in modules.items() if hasattr(module, "layers")}


def shallow(setting: str, layers: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a copy of a setting's model with only the given layers of its stacks; other modules are kept."""
    model = built.get()[setting]
    all_layers = {name: stack.layers for name, stack in stacks(model).items()}
    # Layers are omitted before the copy, because all of them would take long to copy.
    try:
        for name, stack in stacks(model).items():
            stack.layers = nn.ModuleList(all_layers[name][index] for index in layers[name])
        copied = copy.deepcopy(model)
    finally:
        for name, stack in stacks(model).items():
            stack.layers = all_layers[name]
    for name, stack in stacks(copied).items():
        stack.kept_layers = tuple(layers[name])
        # Indices of layers in the model -> in the copy.
        new_index = {index: position for position, index in enumerate(layers[name])}
        kv_sources = getattr(stack, "kv_sources", None)
        if kv_sources:
            kept_sources = {}
            for reader, source in kv_sources.items():  # of layers that read the keys and values of another one
                if reader in new_index:
                    kept_sources[new_index[reader]] = new_index[source]
            stack.kv_sources = kept_sources
        if isinstance(stack, VisionTower):
            stack.full_layers = frozenset(new_index[index] for index in stack.full_layers if index in new_index)
            stack.deep_layers = tuple(new_index[index] for index in stack.deep_layers)
    return copied


class StandInCheckpointer(CheckpointStore):
    """Checkpointer that fills models with random weights and saves nothing."""

    def __init__(self) -> None:
        super().__init__({})
        self.checkpoint_dir = Path()

    def add_source(self, name: str, source: Any) -> None:
        """Accept any source."""

    def source(self, name: str = "policy") -> Any:
        """Return a source without files; its fingerprint is the name."""
        return SimpleNamespace(checkpoint_dir=self.checkpoint_dir, fingerprint=name)

    def load_model(
        self, model: nn.Module, *, device: Any = "cpu", dtype: torch.dtype | None = None, name: str = "policy"
    ) -> None:
        """Materialize every parameter on the meta device, in the form in which conversions store it."""
        if text_decoder(model) is not model:
            if not isinstance(model, ImageTextModel) or model.image_blocks:
                raise UserError(f"model: a {type(model).__name__} with images cannot be simulated: use --dry-run.")
            vision.set(model.description)
        before_load.get()()
        for weight, parameter in list(model.named_parameters()):
            stored_dtype = None  # as it is, of quantized weights
            if parameter.is_floating_point():
                stored_dtype = dtype
            torch.nn.init.zeros_(materialize(model, weight, torch.device("cpu"), stored_dtype))
        model.adapter_init = None
        on_load.get()(model)

    def check_model(self, model: nn.Module, *, name: str = "policy") -> None:
        """Do nothing: there are no files."""

    def check_contents(self, models: Any, **_: Any) -> None:
        """Do nothing: with some layers omitted, names differ from the whole model's."""

    def check_output_dir(self, *, resume: bool) -> None:
        """Do nothing: nothing is written."""

    def lock_output_dir(self) -> None:
        """Do nothing: nothing is written."""

    def find_resume_point(self, cfg: Any = None) -> None:
        """Return None: there is no checkpoint."""

    def save(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def save_quantized(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class StandInTokenizer:
    """Tokenizer that only has a row length."""

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
    "retrieval": ("query", "positive"),
    "documents": (),
    "candidates": (),
}


class StandInDataset(ExampleDataset):
    """Dataset of rows of equal length, with a label for every token.

    If the model has image tokens, half of the tokens of a row are image tokens.

    Args:
        tokenizer: ignored.
        rows: number of rows.
        length: tokens per row.
        kind: format of a row: a text, or the ``trains_on`` of a preference loss.
    """

    def __init__(self, tokenizer: Any, *, rows: int, length: int, kind: str) -> None:
        self._rows = rows
        self._kind = kind
        self._length = length
        self._row = dict.fromkeys(_COLUMNS[kind], [0] * length)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = _Row(self._row)
        description = vision.get()
        if description is not None:
            image = {"images": _image(self._length, description)}
            for column in self._row:
                # A column of tokens has its images beside it: chosen_input_ids, chosen_encoder_input.
                name = column.replace("input_ids", "tokens")
                if "tokens" in name:
                    row[name.replace("tokens", "encoder_input")] = image
        if self._kind == "answers":
            row["is_chosen"] = index % 2 == 0
        if self._kind == "retrieval":
            row |= {"negatives": [], "labels": [0]}
        document = [0] * self._length
        if self._kind == "documents":
            row |= {"documents": [document], "targets": [1.0], "labels": [0]}
        if self._kind == "candidates":  # two are the fewest
            row |= {"documents": [document, document], "targets": [1.0, 0.0], "labels": [0]}
        return row


def _image(length: int, description: Any) -> Images:
    """Return an image that has half of the tokens of a row."""
    merge = description.vision.merge  # patches of a token along each side
    count = max(length // 2, 1)
    patches = torch.zeros(count * merge**2, description.vision.patch_values)
    positions = None
    if description.rope_axes:  # of time, height and width
        positions = torch.arange(length).expand(3, 1, length)  # [3, 1, s]
    return Images(patches, ((1, merge, merge * count),), torch.arange(count), positions)


class _Row(dict[str, Any]):
    """Row that raises if a collate function reads a missing column."""

    def __missing__(self, name: str) -> Any:
        raise SimulationError(
            f"collate_fn: it reads '{name}', but rows of a simulated run only have {', '.join(self)}: use --dry-run."
        )
