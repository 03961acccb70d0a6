"""Open the weight files of a checkpoint in any format."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._gguf import GGUFFile
from torchtune.checkpoints._quantized_files import quantized_files
from torchtune.checkpoints._safetensors_file import Entry, TensorSlice
from torchtune.checkpoints._sources import TORCH_SUFFIXES, Source, TorchFiles
from torchtune.models import Slices, rename_prefix, text_prefixes
from torchtune.training.parallel import Ranks, spec_of

_ALONE = {"": ""}


class TextTower(Source):
    """Text decoder of a larger checkpoint, with the names of a text-only checkpoint.

    Args:
        source: checkpoint of a multimodal model, or of a decoder with weights that are not trained.
        prefixes: from :func:`torchtune.models.text_prefixes`, or ``{"": ""}``.
        untrained: names (as in a text-only checkpoint) of tensors to omit.

    Attributes:
        prefixes: see Args.
        is_multimodal: whether there are other towers.
    """

    def __init__(self, source: Source, prefixes: Mapping[str, str], untrained: Collection[str] = ()) -> None:
        self.prefixes = dict(prefixes)
        self.is_multimodal = self.prefixes != _ALONE
        self._source = source
        inverse = {theirs: ours for ours, theirs in prefixes.items()}
        found = {rename_prefix(name, inverse): name for name in source.names() if name.startswith(tuple(inverse))}
        self._theirs = {ours: name for ours, name in found.items() if ours not in untrained}

    def names(self) -> list[str]:
        """Return the names of the text decoder's tensors, file by file."""
        return list(self._theirs)

    def where(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self._source.where(self._theirs[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._source.shape(self._theirs[name])

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, backed by the file: copy it before changing it."""
        return self._source.read(self._theirs[name], slices)

    def other_towers(self, ranks: Ranks) -> list[Entry]:
        """Return entries that copy all other tensors; ranks take turns."""
        text = set(self._theirs.values())
        others = [name for name in self._source.names() if name not in text]
        return [self._copy(name, is_writer=ranks.rank == turn % ranks.size) for turn, name in enumerate(others)]

    def _copy(self, name: str, *, is_writer: bool) -> Entry:
        def read() -> list[TensorSlice]:
            return [TensorSlice.of(name, self._source.read(name))]

        spec = spec_of(self._source.read(name))
        return Entry({name: spec}, read if is_writer else tuple, spec.itemsize)


def open_source(paths: Sequence[Path], model: nn.Module | None = None) -> Source:
    """Open weight files of one format; for a multimodal model, only the text decoder unless ``model`` is composite.

    Args:
        paths: the files.
        model: the model that is read; weights that it does not train, such as weights for multi-token prediction, are
            omitted.

    Raises:
        CheckpointError: formats are mixed or unknown, or a file is invalid.
    """
    source, spec = _open(paths), getattr(model, "spec", None)
    prefixes = {} if isinstance(source, GGUFFile) or (spec and spec.builder) else text_prefixes(source.names())
    text = TextTower(source, prefixes) if prefixes else source
    untrained = () if spec is None else spec.untrained_names(text.names(), model.description)
    return TextTower(source, prefixes or _ALONE, untrained) if untrained else text


def _open(paths: Sequence[Path]) -> Source:
    suffixes = {path.suffix for path in paths}
    if suffixes == {".safetensors"}:
        return quantized_files(paths)
    if suffixes == {".gguf"}:
        if len(paths) > 1:
            raise CheckpointError("checkpoint_files: a GGUF checkpoint is one file: name just one.")
        return GGUFFile(paths[0])
    if suffixes <= set(TORCH_SUFFIXES):
        return TorchFiles(paths)
    raise CheckpointError(
        f"checkpoint_files: {', '.join(sorted(suffixes))} files cannot be read (together): give safetensors files, one "
        "GGUF file, or torch files."
    )
