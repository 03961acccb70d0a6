"""The source of one model: the folder, files and adapter that its weights are read from."""

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.models import ModelError, get_spec
from torchtune.modules.peft import owned_parameters
from torchtune.training.checkpointing._adapter import adapter_beside_base, find_adapter, load_adapter
from torchtune.training.checkpointing._directories import MARKER
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._export import carry_files
from torchtune.training.checkpointing._gguf import GGUFFile
from torchtune.training.checkpointing._gguf_tokenizer import special_ids, tokenizer_files
from torchtune.training.checkpointing._load import (
    check_base,
    check_config,
    check_description,
    identity,
    load_base,
    read_json,
)
from torchtune.training.checkpointing._model_type import ModelType
from torchtune.training.checkpointing._open_source import TextTower, open_source, without_untrained
from torchtune.training.checkpointing._peft_settings import startable, wanted_start
from torchtune.training.checkpointing._sources import Source, resolve_files
from torchtune.utils import get_logger, log_once, refuse_foreign, write_json

_SAMPLE_BYTES = 2**20


class ModelSource:
    """Where the weights of one model come from.

    Reads safetensors (one file or shards), torch files, Meta's consolidated files and GGUF; the names of the tensors
    tell the format. Weights are streamed: host memory holds one shard file at most.

    Args:
        checkpoint_dir: folder with the weights, usually as downloaded.
        checkpoint_files: names of the weight files, or ``{filename_format, max_filename}``; found by default.
        adapter_checkpoint: adapter to start from: a folder in PEFT's layout, a file in such a folder, or the
            ``adapter_model.pt`` of an older checkpoint; an absolute path, or relative to the working directory or
            ``checkpoint_dir``.
        model_type: name of a :class:`ModelType`, checked against the model; the model decides.
        text_only: export the text decoder as a model of its own. By default other towers and weights of multi-token
            prediction are exported with it, unchanged.
        adapter_dirs: more folders that ``adapter_checkpoint`` may be relative to, such as the output folder of the run.
        repo_id: repository of the weights, which adapters trained on them name as their base; by default what
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
        self._whole: list[TextTower | None] = []
        self._adapter_dirs = (Path(), self.checkpoint_dir, *adapter_dirs)
        # Read from a GGUF file: tokenizer files that an export writes, by name, and token ids for its config.json.
        self._tokenizer_files: dict[str, Any] = {}
        self._token_ids: dict[str, int] = {}

    def open(self) -> Source:
        """The weight files, opened."""
        return open_source(resolve_files(self.checkpoint_dir, self.checkpoint_files))

    def whole(self, model: nn.Module) -> TextTower | None:
        """The checkpoint with more than the model, as opened at the first call; ``None`` for a model exported alone.

        It also has other towers, or weights that are not trained (multi-token prediction).
        """
        if not self._whole:
            self._whole.append(self._find_whole(model))
        return self._whole[0]

    def _find_whole(self, model: nn.Module) -> TextTower | None:
        config = self.checkpoint_dir / "config.json"
        if self.text_only or not config.is_file():
            return None
        source = without_untrained(self.open(), *identity(model))
        if not isinstance(source, TextTower) or (source.is_multimodal and "text_config" not in read_json(config)):
            return None
        return source

    def read(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> set[str]:
        """Fill ``model`` from the files; parameters on the meta device become real on ``device``.

        Args:
            model: sharded or not; every rank reads its own shard.
            device: see above.
            dtype: of parameters that become real; their own by default.

        Returns:
            Names of the parameters that the files have filled.

        Raises:
            CheckpointError: files are missing or corrupt, or do not fit the model.
        """
        source, owned = self.open(), owned_parameters(model)
        self._check_experts(model)
        if isinstance(source, GGUFFile) and not (self.checkpoint_dir / "tokenizer.json").exists():
            self._tokenizer_files, self._token_ids = tokenizer_files(source), special_ids(source)
        self._check_description(model, source)
        init = wanted_start(model)
        starts = {} if init is None else startable(model, init, self.checkpoint_dir)
        left_out = load_base(model, source, device, dtype, starts)
        model.adapter_init = init
        adapter = self._find_adapter(model)
        if adapter is not None:
            load_adapter(model, adapter, device, dtype)
        owned -= {f"{name.removesuffix('weight')}lora_{side}.weight" for name in starts for side in "ab"}
        names = {name for name, _ in model.named_parameters() if adapter is not None or name not in owned}
        return names - left_out

    def check(self, model: nn.Module) -> None:
        """Compare files, family, names and shapes with ``model``, on the meta device; no tensor data is read.

        Raises:
            CheckpointError: see :meth:`read`; truncated files are found when they are read.
        """
        self.check_model_type(model)
        source = self.open()
        self._check_description(model, source)
        check_base(model, source)
        self._check_experts(model)
        self._find_adapter(model)

    def _check_experts(self, model: nn.Module) -> None:
        """Warn that peft reads no adapters of experts beside other towers."""
        whole = self.whole(model)  # opened now: the folder may be gone when the model is saved
        if whole is not None and whole.is_multimodal and any(".experts.lora_" in n for n in owned_parameters(model)):
            log_once(
                get_logger(),
                f"{self.checkpoint_dir}: peft (0.21) reads no adapters of experts in a model with other towers: load "
                "the merged model elsewhere, set text_only for an adapter of the text model, or leave the experts out.",
                level=logging.WARNING,
            )

    def _check_description(self, model: nn.Module, source: Source) -> None:
        if isinstance(source, GGUFFile):
            check_description(model, source.description, source.path)
        else:
            check_config(model, self.checkpoint_dir / "config.json")

    def check_model_type(self, model: nn.Module) -> None:
        """Compare ``model_type``, which chose weight names in older configs, with the family of the model."""
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

    def _find_adapter(self, model: nn.Module) -> Path | None:
        if self.adapter_checkpoint is None:
            return adapter_beside_base(self.checkpoint_dir, model)
        return find_adapter(self._adapter_path(self.adapter_checkpoint), model)

    def _adapter_path(self, adapter_checkpoint: str) -> Path:
        candidates = [folder / adapter_checkpoint for folder in self._adapter_dirs]
        return next((path for path in candidates if path.exists()), candidates[-1])

    @cached_property
    def base_fingerprint(self) -> list[list[int]]:
        """Size and CRC-32 of samples of every weight file: equal for equal weights, wherever the folder lies.

        The first, middle and last MiB of a file are read: fine-tuned weights differ from their base everywhere.
        """
        return [_sample(path) for path in resolve_files(self.checkpoint_dir, self.checkpoint_files)]

    @cached_property
    def fingerprint(self) -> list[list[int]]:
        """:attr:`base_fingerprint`, and the same of adapters that are loaded with the weights."""
        paths = _adapters_in(self.checkpoint_dir)
        if self.adapter_checkpoint is not None:
            path = self._adapter_path(self.adapter_checkpoint)
            paths += _adapters_in(path) if path.is_dir() else [path]
        return self.base_fingerprint + [_sample(path) for path in dict.fromkeys(paths)]

    def carry_files(self, folder: Path) -> None:
        """Copy tokenizer, chat template and generation settings into an export, or write those of a GGUF file."""
        carry_files(self.checkpoint_dir, folder)
        for name, content in self._tokenizer_files.items():
            if not (folder / name).exists():
                write_json(folder / name, content)
        if self._token_ids:
            write_json(folder / "config.json", {**read_json(folder / "config.json"), **self._token_ids})

    def base_name(self) -> str:
        """Repository of the weights if it is known and they were not trained since, else the folder."""
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
