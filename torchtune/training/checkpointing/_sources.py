"""Files of weights, opened for reading one tensor at a time."""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._gguf import GGUFFile

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class Source(Protocol):
    """Named tensors in files.

    Attributes:
        kind: whose names they bear: ``"hf"``, ``"meta"``, ``"gguf"`` or ``"tune"``.
    """

    kind: str

    def names(self) -> list[str]:
        """Names of all tensors, file by file."""
        ...

    def where(self, name: str) -> Path:
        """File that holds a tensor."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on CPU, perhaps backed by the file."""
        ...


def _kind_of(names: Sequence[str]) -> str:
    if any(name.startswith(("model.", "lm_head.")) for name in names):
        return "hf"
    if any(".attention.wq." in name for name in names):
        return "meta"
    return "tune"


class SafetensorsFiles:
    """Safetensors files, memory mapped.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, or two hold the same tensor.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            _must_exist(path)
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} ({path.stat().st_size:,} bytes) is not a whole safetensors file ({error}): "
                    "download or copy it again."
                ) from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self._paths:
                    raise CheckpointError(f"The tensor '{name}' is in both {self._paths[name].name} and {path.name}.")
                self._files[name], self._paths[name] = file, path
        self.kind = _kind_of(list(self._paths))

    def names(self) -> list[str]:
        """Names of all tensors, file by file."""
        return list(self._paths)

    def where(self, name: str) -> Path:
        """File that holds a tensor."""
        return self._paths[name]

    def read(self, name: str) -> torch.Tensor:
        """A tensor backed by the file: copy it before changing it."""
        return self._files[name].get_tensor(name)


class TorchFiles:
    """Files written by ``torch.save``, memory mapped, read without running what a pickle may hold.

    Raises:
        CheckpointError: a file is missing or corrupt, or holds anything but tensors.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            for name, value in safe_torch_load(path).items():
                if not isinstance(value, torch.Tensor):
                    raise CheckpointError(
                        f"{path} holds '{name}', a {type(value).__name__}, where a tensor is expected: "
                        "name the files of weights in checkpoint_files."
                    )
                self._tensors[name], self._paths[name] = value, path
        self.kind = _kind_of(list(self._paths))

    def names(self) -> list[str]:
        """Names of all tensors, file by file."""
        return list(self._tensors)

    def where(self, name: str) -> Path:
        """File that holds a tensor."""
        return self._paths[name]

    def read(self, name: str) -> torch.Tensor:
        """A tensor backed by the file: copy it before changing it."""
        return self._tensors[name]


class FormattedCheckpointFiles:
    """Names of numbered shards from a pattern.

    Args:
        filename_format: has two ``{}``: number of the shard and number of shards, for example
            ``model-{}-of-{}.safetensors``.
        max_filename: number of shards as it is written, for example ``"00004"``.

    Raises:
        CheckpointError: the pattern or the number is malformed.
    """

    def __init__(self, filename_format: str, max_filename: str) -> None:
        if filename_format.count("{}") != 2:
            raise CheckpointError(
                f"checkpoint_files: filename_format '{filename_format}' must hold {{}} exactly twice, "
                "as in model-{}-of-{}.safetensors."
            )
        if not isinstance(max_filename, str) or not max_filename.isdigit():
            raise CheckpointError(
                f"checkpoint_files: max_filename {max_filename!r} must be digits in quotes, like '00004'."
            )
        self.filename_format = filename_format
        self.max_filename = max_filename

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "FormattedCheckpointFiles":
        """From ``{"filename_format": …, "max_filename": …}``. Raises ``CheckpointError`` if one is missing."""
        if set(d) != {"filename_format", "max_filename"}:
            raise CheckpointError("checkpoint_files: needs filename_format and max_filename, or a list of names.")
        return cls(d["filename_format"], d["max_filename"])

    def build_checkpoint_filenames(self) -> list[str]:
        """All names, in order."""
        width = len(self.max_filename)
        numbers = (str(number).zfill(width) for number in range(1, int(self.max_filename) + 1))
        return [self.filename_format.format(number, self.max_filename) for number in numbers]


def safe_torch_load(checkpoint_path: str | Path, weights_only: bool = True, mmap: bool = True) -> dict[str, Any]:
    """Load a file of ``torch.save`` onto the CPU.

    Raises:
        CheckpointError: it is missing, corrupt, or would need to run code to be read.
    """
    path = Path(checkpoint_path)
    _must_exist(path)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read as a file of tensors ({reason}): download it again, or convert it to safetensors."
        ) from error
    return loaded


def _must_exist(path: Path) -> None:
    if path.is_file():
        return
    there = sorted(p.name for p in path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []
    hint = f"the folder holds {', '.join(there[:4])}" if there else f"{path.parent} holds no {path.suffix} file"
    if not path.parent.is_dir():
        hint = f"the folder {path.parent} does not exist"
    raise CheckpointError(f"There is no file {path} ({hint}): check checkpoint_dir and checkpoint_files.")


def find_files(checkpoint_dir: Path) -> list[Path]:
    """The files of weights of a folder: what an index lists, or the only kind of file that is there.

    Raises:
        CheckpointError: the folder is missing, holds no weights, or an index names a file that is not there.
    """
    if not checkpoint_dir.is_dir():
        raise CheckpointError(f"checkpoint_dir: there is no folder {checkpoint_dir}: `tune download` makes one.")
    for index in (SAFETENSORS_INDEX, TORCH_INDEX):
        path = checkpoint_dir / index
        if not path.exists():
            continue
        try:
            shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a valid index of shards: download it again.") from error
        missing = [shard for shard in shards if not (checkpoint_dir / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{checkpoint_dir} lacks {', '.join(missing[:3])}{' …' if missing[3:] else ''}, {len(missing)} of the "
                f"{len(shards)} shards that {index} lists: download the checkpoint again."
            )
        return [checkpoint_dir / shard for shard in shards]
    for pattern in ("model*.safetensors", "*.safetensors", "*.gguf", "pytorch_model*.bin", "consolidated*.pth"):
        found = sorted(p for p in checkpoint_dir.glob(pattern) if not p.name.startswith("adapter_model"))
        if found:
            return found
    raise CheckpointError(f"checkpoint_dir: {checkpoint_dir} holds no weights (*.safetensors, *.gguf, *.bin, *.pth).")


def resolve_files(checkpoint_dir: Path, checkpoint_files: Sequence[str] | Mapping[str, str] | None) -> list[Path]:
    """Paths of the files of weights that were asked for, or found."""
    if checkpoint_files is None:
        return find_files(checkpoint_dir)
    if isinstance(checkpoint_files, Mapping):
        checkpoint_files = FormattedCheckpointFiles.from_dict(checkpoint_files).build_checkpoint_filenames()
    if len(checkpoint_files) == 0:
        raise CheckpointError("checkpoint_files: the list is empty: name the files, or leave the key out.")
    return [checkpoint_dir / name for name in sorted(checkpoint_files)]


def open_source(paths: Sequence[Path]) -> Source:
    """Open files of weights, all of one format.

    Raises:
        CheckpointError: formats are mixed or unknown, or see the sources.
    """
    suffixes = {path.suffix for path in paths}
    if suffixes == {".safetensors"}:
        return SafetensorsFiles(paths)
    if suffixes == {".gguf"}:
        if len(paths) > 1:
            raise CheckpointError("checkpoint_files: a GGUF checkpoint is one file: name just one.")
        return GGUFFile(paths[0])
    if suffixes <= set(_TORCH_SUFFIXES):
        return TorchFiles(paths)
    raise CheckpointError(
        f"checkpoint_files: {', '.join(sorted(suffixes))} files cannot be read (together): give safetensors files, one "
        "GGUF file, or torch files."
    )


def stream(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a source."""
    for name in source.names():
        yield name, source.read(name)
