"""Weight files of a checkpoint: their names, and files of every format, opened to read one tensor at a time.

``_quantized_files`` has the formats of quantized weights, ``_gguf`` that of llama.cpp.
"""

import math
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from torchtune import utils
from torchtune.models import Description, Slices, rename_prefix, text_prefixes
from torchtune.utils import UserError, first_line

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Patterns of weight files in a folder without an index, in order of preference.
_WEIGHT_FILES = (
    "model*.safetensors",
    "*.safetensors",
    "*.gguf",
    "pytorch_model*.bin",
    "model*.bin",
    "consolidated*.pth",
    "*.pth",
)
# Bytes that are read from a memory-mapped file before it is reopened.
_REOPEN_BYTES = 16 * 2**20
# Suffixes of tensors that only files with quantized weights have.
FLOAT8_SCALE = "_scale_inv"
MXFP4_BLOCKS = "_blocks"
SCALE = "_scale"
# Prefixes of a checkpoint that is one decoder, with its names unchanged.
_NO_PREFIX = {"": ""}


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be read, does not fit the model, or cannot be written."""


class WeightFiles(ABC):
    """Named tensors in files, opened for reading.

    Attributes:
        name_format: format of the names: ``"gguf"``, or None to detect it from the names.
    """

    name_format: str | None = None

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors, file by file."""

    @abstractmethod
    def path_of(self, name: str) -> Path:
        """Return the file of a tensor."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    @abstractmethod
    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, on the CPU, possibly backed by the file: copy it before changing it."""

    def location(self) -> Path | str:
        """Return the folder of the files, for error messages."""
        names = self.names()
        if not names:
            return "checkpoint_files"
        return self.path_of(names[0]).parent

    def described_model(self) -> Description | None:
        """Return the model that the files themselves describe; None if ``config.json`` describes it."""
        return None

    def tokenizer_files(self) -> dict[str, Any]:
        """Return the contents of JSON files of the tokenizer inside the weight files, by name."""
        return {}

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids that ``config.json`` has for the tokenizer inside the weight files, by key."""
        return {}

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and value of all tensors."""
        for name in self.names():
            yield name, self.read(name)


class ShardFiles(WeightFiles):
    """Shard files, one open at a time; in the order of :meth:`names`, host memory holds at most one shard file.

    Subclasses open a file with ``_load``, and list its tensors with ``_names_in``.

    Raises:
        CheckpointError: a file is missing or corrupt, or two files hold the same tensor.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        for path in paths:
            for name in self._names_in(path):
                if name in self._paths:
                    raise CheckpointError(
                        f"The tensor '{name}' is in both {self._paths[name]} and {path.name}: name the files of one "
                        "checkpoint in checkpoint_files (parts of tensors, as in Meta's larger models, cannot be read)."
                    )
                self._paths[name] = path

    @abstractmethod
    def _load(self, path: Path) -> Any:
        """Open a file."""

    @abstractmethod
    def _names_in(self, path: Path) -> list[str]:
        """Return the names of a file's tensors."""

    def names(self) -> list[str]:
        """Return the names of all tensors, file by file."""
        return list(self._paths)

    def path_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self._paths[name]

    def _file(self, name: str) -> Any:
        path = self._paths[name]
        if self._open is None or self._open[0] != path:
            self._open = None  # close it before opening the next one
            self._open = (path, self._load(path))
        return self._open[1]


class SafetensorsFiles(ShardFiles):
    """Memory-mapped safetensors files.

    Pages that were read count as memory of the process until the file is closed, so it is reopened regularly to bound
    host memory.
    """

    _read_bytes = 0

    def _load(self, path: Path) -> Any:
        check_exists(path)
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size:,} bytes) is not a whole safetensors file ({error}): "
                "download or copy it again."
            ) from error

    def _names_in(self, path: Path) -> list[str]:
        return list(self._load(path).keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, backed by the file: copy it before changing it."""
        if self._read_bytes > _REOPEN_BYTES:
            self._open = None
            self._read_bytes = 0
        # get_slice reads only the bytes of the slice.
        stored = self._file(name).get_slice(name)
        tensor = stored[slices or ...]
        elements = tensor.numel()
        if slices is not None and len(slices) > 1:
            # A slice of columns touches the memory pages of all columns of its rows.
            rows = slices[0].stop - slices[0].start
            elements = max(elements, rows * math.prod(stored.get_shape()[1:]))
        self._read_bytes += elements * tensor.element_size()
        return tensor


class TorchFiles(ShardFiles):
    """Memory-mapped files of ``torch.save``, loaded with ``weights_only=True``."""

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        return safe_torch_load(path)

    def _names_in(self, path: Path) -> list[str]:
        tensors = self._load(path)
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{path} holds '{name}', a {type(value).__name__}, where a tensor is expected: "
                    "name the files of weights in checkpoint_files."
                )
        return list(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._file(name)[name].shape)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, backed by the file: copy it before changing it."""
        return self._file(name)[name][slices or ...]


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
    """Open safetensors or torch files; for a multimodal model, only the text decoder unless ``model`` is composite.

    Args:
        paths: the files, of one format.
        model: the model to load; weights that it does not train, such as weights for multi-token prediction, are
            omitted.

    Raises:
        CheckpointError: formats are mixed or unknown, or a file is invalid.
    """
    files = _open_format(paths)
    spec = getattr(model, "spec", None)
    is_composite = spec is not None and spec.builder is not None
    prefixes = {}
    decoder_files = files
    if not is_composite:
        prefixes = text_prefixes(files.names())
        if prefixes:
            decoder_files = TextDecoderFiles(files, prefixes)
    if spec is None:
        return decoder_files
    untrained = spec.untrained_names(decoder_files.names(), model.description)
    if not untrained:
        return decoder_files
    return TextDecoderFiles(files, prefixes or _NO_PREFIX, untrained)


def _open_format(paths: Sequence[Path]) -> WeightFiles:
    """Open weight files by their suffix, and safetensors files by the suffixes of their tensors."""
    suffixes = {path.suffix for path in paths}
    if suffixes == {".safetensors"}:
        files = SafetensorsFiles(paths)
        names = files.names()
        has_blocks = any(".experts." in name and name.endswith(MXFP4_BLOCKS) for name in names)
        has_scales = any(name.endswith((FLOAT8_SCALE, f".weight{SCALE}")) for name in names)
        if not has_blocks and not has_scales:
            return files
        from torchtune.checkpoints._quantized_files import Mxfp4Files, ScaledFiles  # subclasses of SafetensorsFiles

        return Mxfp4Files(paths) if has_blocks else ScaledFiles(paths)
    if suffixes <= set(TORCH_SUFFIXES):
        return TorchFiles(paths)
    raise CheckpointError(
        f"checkpoint_files: {', '.join(sorted(suffixes))} files cannot be read (together): give safetensors files, one "
        "GGUF file, or torch files."
    )


def safe_torch_load(checkpoint_path: str | Path, weights_only: bool = True, mmap: bool = True) -> dict[str, Any]:
    """Load a file of ``torch.save`` onto the CPU.

    Args:
        checkpoint_path: the file.
        weights_only: only load tensors, containers and numbers; otherwise the pickle can run code.
        mmap: memory-map the file, so that tensors are read on use; not for files older than torch 1.6.

    Raises:
        CheckpointError: the file is missing, corrupt, holds no dict, or needs to run code.
    """
    path = Path(checkpoint_path)
    check_exists(path)
    try:
        contents = torch.load(
            path, map_location="cpu", mmap=mmap and zipfile.is_zipfile(path), weights_only=weights_only
        )
    except Exception as error:  # reading a damaged pickle raises any kind of error
        reason = first_line(error).partition(". ")[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's message advises to run the code
            reason = "it is damaged, or holds more than tensors, which could run code when it is read"
        raise CheckpointError(
            f"{path} cannot be read as a file of tensors ({reason}): download it again, or convert it to safetensors."
        ) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__} where a dict of tensors is expected.")
    return contents


def read_json(path: Path) -> dict:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    return utils.read_json(path, CheckpointError)


def check_exists(path: Path) -> None:
    """Raise ``CheckpointError`` if there is no file ``path``; the message lists similar files of its folder."""
    if path.is_file():
        return
    similar = sorted(sibling.name for sibling in path.parent.glob(f"*{path.suffix}"))
    if similar:
        hint = f"the folder holds {', '.join(similar[:4])}"
    elif path.parent.is_dir():
        hint = f"{path.parent} holds no {path.suffix} file"
    else:
        hint = f"the folder {path.parent} does not exist"
    raise CheckpointError(f"There is no file {path} ({hint}): check checkpoint_dir and checkpoint_files.")


class FormattedCheckpointFiles:
    """Names of numbered shard files from a pattern.

    Args:
        filename_format: pattern with two ``{}``, the number of the shard and the number of shards, for example
            ``model-{}-of-{}.safetensors``.
        max_filename: number of shards as written in file names, for example ``"00004"``.

    Raises:
        CheckpointError: the pattern or the number is malformed.

    Example:
        >>> files = torchtune.checkpoints.FormattedCheckpointFiles("model-{}-of-{}.safetensors", "2")
        >>> files.build_checkpoint_filenames()
        ['model-1-of-2.safetensors', 'model-2-of-2.safetensors']
    """

    def __init__(self, filename_format: str, max_filename: str) -> None:
        if filename_format.count("{}") != 2:
            raise CheckpointError(
                f"checkpoint_files: filename_format '{filename_format}' must hold {{}} exactly twice, "
                "as in model-{}-of-{}.safetensors."
            )
        if not isinstance(max_filename, str) or not max_filename.isdecimal() or len(max_filename) > 6:
            raise CheckpointError(
                f"checkpoint_files: max_filename {max_filename!r} must be up to 6 digits in quotes, like '00004'."
            )
        self.filename_format = filename_format
        self.max_filename = max_filename

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "FormattedCheckpointFiles":
        """Build from ``{"filename_format": …, "max_filename": …}``. Raises ``CheckpointError`` if a key is missing."""
        if set(d) != {"filename_format", "max_filename"}:
            raise CheckpointError("checkpoint_files: needs filename_format and max_filename, or a list of names.")
        return cls(d["filename_format"], d["max_filename"])

    def build_checkpoint_filenames(self) -> list[str]:
        """Return all names, in order."""
        width = len(self.max_filename)
        names = []
        for number in range(1, int(self.max_filename) + 1):
            names.append(self.filename_format.format(str(number).zfill(width), self.max_filename))
        return names


def _shards_in_index(index: Path) -> list[str]:
    """Return the names of the shard files in an index, sorted.

    Raises:
        CheckpointError: the index is damaged, or names a file outside of its folder.
    """
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(f"{index} is not a valid index of shards (weight_map): download it again.")
    for name in names:
        # Files may be links to other folders, as in the cache of huggingface_hub, but names must not leave the folder.
        is_outside = Path(name).is_absolute() or ".." in Path(name).parts
        if is_outside or "\0" in name or len(name) > 255:
            raise CheckpointError(
                f"{index} lists {name[:255]!r}, which is not a file of this folder: download it again."
            )
    return sorted(set(names))


def find_files(checkpoint_dir: Path) -> list[Path]:
    """Return the weight files of a folder: the files in its index, or of the first matching pattern.

    Raises:
        CheckpointError: the folder is missing, holds no weights, or lacks a file of the index.
    """
    if not checkpoint_dir.is_dir():
        raise CheckpointError(f"checkpoint_dir: there is no folder {checkpoint_dir}: `tune download` makes one.")
    for index in (SAFETENSORS_INDEX, TORCH_INDEX):
        path = checkpoint_dir / index
        if not path.exists():
            continue
        shards = _shards_in_index(path)
        missing = [shard for shard in shards if not (checkpoint_dir / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{checkpoint_dir} lacks {', '.join(missing[:3])}{' …' if missing[3:] else ''}, {len(missing)} of the "
                f"{len(shards)} shards that {index} lists: download the checkpoint again."
            )
        return [checkpoint_dir / shard for shard in shards]
    # Without an index, in the order of preference: a folder may have the same weights in several formats.
    for pattern in _WEIGHT_FILES:
        paths = sorted(path for path in checkpoint_dir.glob(pattern) if not path.name.startswith("adapter"))
        if pattern == "*.gguf" and len(paths) > 1:
            raise CheckpointError(
                f"checkpoint_dir: {checkpoint_dir} holds {len(paths)} GGUF files ({paths[0].name}, {paths[1].name} …): "
                "name one in checkpoint_files."
            )
        if paths:
            return paths
    if any(checkpoint_dir.glob("adapter_model.*")):
        raise CheckpointError(
            f"checkpoint_dir: {checkpoint_dir} holds an adapter and no model: give the folder of the base model, and "
            "this one as adapter_checkpoint."
        )
    raise CheckpointError(
        f"checkpoint_dir: {checkpoint_dir} holds no weights (*.safetensors, *.gguf, *.bin, *.pth): "
        "give the folder that does."
    )


def resolve_files(checkpoint_dir: Path, checkpoint_files: Sequence[str] | Mapping[str, str] | None) -> list[Path]:
    """Return the paths of the named weight files, or find them."""
    if checkpoint_files is None:
        return find_files(checkpoint_dir)
    if isinstance(checkpoint_files, Mapping):
        checkpoint_files = FormattedCheckpointFiles.from_dict(checkpoint_files).build_checkpoint_filenames()
    if isinstance(checkpoint_files, str):
        checkpoint_files = [checkpoint_files]
    if len(checkpoint_files) == 0:
        raise CheckpointError("checkpoint_files: the list is empty: name the files, or leave the key out.")
    return [checkpoint_dir / name for name in sorted(checkpoint_files)]
