"""The source of one model's weights: folder, files and adapter."""

import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._adapter import adapter_beside_base, add_new_tokens, find_adapter, load_adapter
from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._directories import MARKER
from torchtune.checkpoints._gguf import GGUFFile
from torchtune.checkpoints._gguf_tokenizer import special_ids, tokenizer_files
from torchtune.checkpoints._load_weights import check_base, check_config, check_description, load_base, read_json
from torchtune.checkpoints._model_type import ModelType
from torchtune.checkpoints._model_weights import ModelWeights
from torchtune.checkpoints._open_source import TextTower, open_source
from torchtune.checkpoints._peft_settings import startable, wanted_start
from torchtune.checkpoints._saved_tokenizer import GENERATION_CONFIG
from torchtune.checkpoints._sources import Source, resolve_files
from torchtune.models import ModelError, get_spec
from torchtune.tokenizers import is_tokenizer_file
from torchtune.utils import refuse_foreign, write_json

# Files that are not copied from the source folder: weights, and files that an export writes itself.
_LEFT_BEHIND = (".pt", ".pth", ".bin", ".safetensors", ".gguf", ".ckpt", ".index.json", ".distcp", ".h5", ".tmp")
_WRITTEN_ANEW = ("config.json", "torchtune_config.yaml")
_OWN_FOLDERS = ("epoch_", "step_", "recipe_state")
_FOLDERS_OF_A_CHECKPOINT = ("state", "adapter", "logs", "__pycache__")
_MAX_CARRIED_BYTES = 100 * 2**20
_SAMPLE_BYTES = 2**20


class ModelSource:
    """Source of one model's weights.

    Reads safetensors (one file or shards), torch files, Meta's consolidated files and GGUF; the format follows from the
    names of the tensors. Weights are streamed: host memory holds at most one shard file.

    Args:
        checkpoint_dir: folder of the weights, usually as downloaded.
        checkpoint_files: names of the weight files, or ``{filename_format, max_filename}``; found by default.
        adapter_checkpoint: initial adapter: a folder in PEFT's layout, a file in such a folder, or the
            ``adapter_model.pt`` of an older checkpoint; an absolute path, or relative to the working directory or
            ``checkpoint_dir``.
        model_type: name of a :class:`ModelType`; it must match the model.
        text_only: export the text decoder as a separate model. By default other towers and weights for multi-token
            prediction are exported with it, unchanged.
        adapter_dirs: further base folders of a relative ``adapter_checkpoint``, such as the output folder of the run.
        repo_id: repository of the weights, which adapters name as their base; by default the repository that
            ``tune download`` recorded in the folder.

    Raises:
        CheckpointError: ``model_type`` is unknown.

    Example:
        >>> source = torchtune.training.ModelSource(checkpoint)
        >>> len(source.open().names())
        20
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        *,
        adapter_checkpoint: str | None = None,
        model_type: str | None = None,
        text_only: bool = False,
        adapter_dirs: Iterable[Path] = (),
        repo_id: str | None = None,
    ) -> None:
        if model_type is not None and model_type not in ModelType.__members__:
            raise CheckpointError(f"model_type: '{model_type}' is none of {', '.join(ModelType.__members__)}.")
        self.checkpoint_dir = Path(checkpoint_dir)
        refuse_foreign(self.checkpoint_dir, "checkpointer.checkpoint_dir")
        self.checkpoint_files = checkpoint_files
        self.adapter_checkpoint = adapter_checkpoint
        self.model_type = None if model_type is None else ModelType[model_type]
        self.text_only = text_only
        self.repo_id = repo_id
        self._adapter_dirs = (Path(), self.checkpoint_dir, *adapter_dirs)
        # From a GGUF file: tokenizer files of an export, by name, and token ids for its config.json.
        self._tokenizer_files: dict[str, Any] = {}
        self._token_ids: dict[str, int] = {}

    def open(self, model: nn.Module | None = None) -> Source:
        """Open the weight files; for a multimodal checkpoint, only the text decoder unless ``model`` is composite."""
        return open_source(resolve_files(self.checkpoint_dir, self.checkpoint_files), model)

    def whole(self, model: nn.Module) -> TextTower | None:
        """Return the opened checkpoint if it has more tensors than the model; None if the model is exported alone.

        The other tensors belong to other towers, or to untrained layers for multi-token prediction.
        """
        if not hasattr(self, "_whole"):
            self._whole = self._find_whole(model)
        return self._whole

    def _find_whole(self, model: nn.Module) -> TextTower | None:
        config = self.checkpoint_dir / "config.json"
        if self.text_only or not config.is_file():
            return None
        source = self.open(model)
        if not isinstance(source, TextTower) or (source.is_multimodal and "text_config" not in read_json(config)):
            return None
        return source

    def read(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> set[str]:
        """Load ``model`` from the files; parameters on the meta device are materialized on ``device``.

        Args:
            model: sharded or not; every rank reads its own shard.
            device: device of materialized parameters.
            dtype: dtype of materialized parameters; unchanged by default.

        Returns:
            Names of the loaded parameters.

        Raises:
            CheckpointError: files are missing or corrupt, or do not fit the model.
        """
        source, weights = self.open(model), ModelWeights(model)
        self.whole(model)  # opened now: the folder may be gone when the model is saved
        if isinstance(source, GGUFFile) and not (self.checkpoint_dir / "tokenizer.json").exists():
            self._tokenizer_files, self._token_ids = tokenizer_files(source), special_ids(source)
        self._check_description(model, source)
        init = wanted_start(model)
        starts = {} if init is None else startable(weights, init, self.checkpoint_dir)
        left_out = load_base(weights, source, device, dtype, starts)
        model.adapter_init = init
        if (adapter := self._find_adapter(weights)) is not None:
            add_new_tokens(model, adapter)
            weights = ModelWeights(model)
            load_adapter(weights, adapter, device, dtype)
            return weights.parameters.keys() - left_out
        started = {f"{name.removesuffix('weight')}lora_{side}.weight" for name in starts for side in "ab"}
        return weights.parameters.keys() - left_out - (weights.owned - started)

    def check(self, model: nn.Module) -> None:
        """Check files, family, names and shapes against ``model`` on the meta device; no tensor data is read.

        Raises:
            CheckpointError: see :meth:`read`; truncated files are only found by :meth:`read`.
        """
        self.check_model_type(model)
        source, weights = self.open(model), ModelWeights(model)
        self._check_description(model, source)
        check_base(weights, source)
        self._find_adapter(weights)

    def _check_description(self, model: nn.Module, source: Source) -> None:
        if isinstance(source, GGUFFile):
            check_description(model, source.description, source.path)
        else:
            check_config(model, self.checkpoint_dir / "config.json")

    def check_model_type(self, model: nn.Module) -> None:
        """Check ``model_type``, which selected the weight names in older configs, against the model's family."""
        spec = getattr(model, "spec", None)
        if self.model_type is None or spec is None or self.model_type.name in spec.model_types:
            return
        try:
            named = get_spec(self.model_type.value)
        except ModelError:
            named = None
        if named is None or named.weight_map("hf") != spec.weight_map("hf"):
            raise CheckpointError(
                f"model_type: {self.model_type.name} is not the kind of the model, which is '{spec.name}': leave "
                "model_type out, or use a builder of that kind."
            )

    def _find_adapter(self, weights: ModelWeights) -> Path | None:
        if self.adapter_checkpoint is None:
            return adapter_beside_base(self.checkpoint_dir, weights)
        return find_adapter(self._adapter_path(self.adapter_checkpoint), weights)

    def _adapter_path(self, adapter_checkpoint: str) -> Path:
        candidates = [folder / adapter_checkpoint for folder in self._adapter_dirs]
        return next((path for path in candidates if path.exists()), candidates[-1])

    @cached_property
    def base_fingerprint(self) -> list[list[int]]:
        """Size and CRC-32 of samples of every weight file, independent of the folder.

        Only the first, middle and last MiB of a file are read: fine-tuning changes weights everywhere.
        """
        return [_sample(path) for path in resolve_files(self.checkpoint_dir, self.checkpoint_files)]

    @cached_property
    def fingerprint(self) -> list[list[int]]:
        """:attr:`base_fingerprint`, extended by the adapters that are loaded with the weights."""
        paths = _adapters_in(self.checkpoint_dir)
        if self.adapter_checkpoint is not None:
            path = self._adapter_path(self.adapter_checkpoint)
            paths += _adapters_in(path) if path.is_dir() else [path]
        return self.base_fingerprint + [_sample(path) for path in dict.fromkeys(paths)]

    def carry_files(self, folder: Path, *, tokenizer: bool = True) -> None:
        """Copy tokenizer, chat template, generation settings and other small files into an export; overwrite nothing.

        From a folder without ``config.json``, such as a folder of downloaded GGUF files, only tokenizer files and
        generation settings are copied. For a GGUF source, they are created from its metadata.

        Args:
            folder: folder of the export.
            tokenizer: whether to copy tokenizer and chat template.
        """
        base = self.checkpoint_dir
        own = (base / "config.json").is_file()
        # Folders of the other models in a checkpoint.
        models = [path.parent.name for path in base.glob("*/config.json")] if (base / MARKER).exists() else []
        for path in sorted(base.rglob("*") if own else base.glob("*")):
            relative, target = path.relative_to(base), folder / path.relative_to(base)
            is_of_tokenizer = is_tokenizer_file(relative)
            if _stays_behind(relative) or relative.parts[0] in models or target.exists():
                continue
            if not (own or is_of_tokenizer or path.name == GENERATION_CONFIG) or (is_of_tokenizer and not tokenizer):
                continue
            if path.is_file() and path.stat().st_size <= _MAX_CARRIED_BYTES:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        for name, content in self._tokenizer_files.items():
            if not (folder / name).exists() and (tokenizer or not is_tokenizer_file(Path(name))):
                write_json(folder / name, content)
        if self._token_ids:
            write_json(folder / "config.json", {**read_json(folder / "config.json"), **self._token_ids})

    def base_name(self) -> str:
        """Return the known repository of weights that are not fine-tuned, otherwise the folder."""
        if self.repo_id is not None:
            return self.repo_id
        path = self.checkpoint_dir / "original_repo_id.json"
        if path.is_file() and not (self.checkpoint_dir / MARKER).exists():
            name = read_json(path).get("repo_id")
            if isinstance(name, str):
                return name
        return str(self.checkpoint_dir.resolve())


def _adapters_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("adapter_*") if path.suffix in (".safetensors", ".pt", ".bin"))


def _sample(path: Path) -> list[int]:
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for start in dict.fromkeys((0, size // 2, max(size - _SAMPLE_BYTES, 0))):
            file.seek(start)
            crc = zlib.crc32(file.read(_SAMPLE_BYTES), crc)
    return [size, crc]


def _stays_behind(relative: Path) -> bool:
    """Return whether a file of the source is hidden, holds weights, belongs to a run, or is written by the export."""
    name = relative.name
    return (
        any(part.startswith(".") for part in relative.parts)
        or relative.parts[0].startswith(_OWN_FOLDERS)
        or (len(relative.parts) > 1 and relative.parts[0] in _FOLDERS_OF_A_CHECKPOINT)
        or name.endswith(_LEFT_BEHIND)
        or name.startswith(("adapter_config", "adapter_model", "adapter_conversions"))
        or str(relative) in _WRITTEN_ANEW
    )
