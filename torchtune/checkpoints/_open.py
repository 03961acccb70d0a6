"""Open the weight files of a checkpoint in any format, and the text decoder in those of a larger one."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from torchtune.checkpoints._gguf import GGUFFile
from torchtune.checkpoints._quantized_files import open_safetensors
from torchtune.checkpoints._weight_files import TORCH_SUFFIXES, CheckpointError, TorchFiles, WeightFiles
from torchtune.models import Slices, rename_prefix, text_prefixes

# Prefixes of a checkpoint that is one decoder, with its names unchanged.
_NO_PREFIX = {"": ""}


class TextDecoderFiles(WeightFiles):
    """The text decoder of a larger checkpoint, with the names of a text-only checkpoint.

    Args:
        files: checkpoint of a multimodal model, or of a decoder with weights that are not trained.
        prefixes: from :func:`torchtune.models.text_prefixes`: prefix of a text-only checkpoint -> prefix in ``files``;
            ``{"": ""}`` for a decoder with weights that are not trained.
        untrained: names (as in a text-only checkpoint) of tensors to omit.

    Attributes:
        prefixes: see Args.
        is_multimodal: whether there are other towers.
    """

    def __init__(self, files: WeightFiles, prefixes: Mapping[str, str], untrained: Collection[str] = ()) -> None:
        self.prefixes = dict(prefixes)
        self.is_multimodal = self.prefixes != _NO_PREFIX
        self._files = files
        text_prefix_of = {composite: text for text, composite in prefixes.items()}
        self._composite_names: dict[str, str] = {}  # name of a text-only checkpoint -> name in the files
        for composite_name in files.names():
            if composite_name.startswith(tuple(text_prefix_of)):
                name = rename_prefix(composite_name, text_prefix_of)
                if name not in untrained:
                    self._composite_names[name] = composite_name

    def names(self) -> list[str]:
        """Return the names of the text decoder's tensors, file by file."""
        return list(self._composite_names)

    def path_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self._files.path_of(self._composite_names[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._files.shape(self._composite_names[name])

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, backed by the file: copy it before changing it."""
        return self._files.read(self._composite_names[name], slices)

    def other_names(self) -> list[str]:
        """Return the names in the files of all other tensors: other towers, and weights that are not trained."""
        decoder_names = set(self._composite_names.values())
        return [name for name in self._files.names() if name not in decoder_names]

    def read_other(self, name: str) -> torch.Tensor:
        """Read one of :meth:`other_names`."""
        return self._files.read(name)


def open_weight_files(paths: Sequence[Path], model: nn.Module | None = None) -> WeightFiles:
    """Open weight files of one format; for a multimodal model, only the text decoder unless ``model`` is composite.

    Args:
        paths: the files.
        model: the model to load; weights that it does not train, such as weights for multi-token prediction, are
            omitted.

    Raises:
        CheckpointError: formats are mixed or unknown, or a file is invalid.
    """
    files = _open_format(paths)
    spec = getattr(model, "spec", None)
    is_composite = spec is not None and spec.builder is not None
    prefixes = {}
    if files.name_format != "gguf" and not is_composite:
        prefixes = text_prefixes(files.names())
    decoder_files = TextDecoderFiles(files, prefixes) if prefixes else files
    if spec is None:
        return decoder_files
    untrained = spec.untrained_names(decoder_files.names(), model.description)
    if not untrained:
        return decoder_files
    return TextDecoderFiles(files, prefixes or _NO_PREFIX, untrained)


def _open_format(paths: Sequence[Path]) -> WeightFiles:
    """Open weight files by their suffix."""
    suffixes = {path.suffix for path in paths}
    if suffixes == {".safetensors"}:
        return open_safetensors(paths)
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
