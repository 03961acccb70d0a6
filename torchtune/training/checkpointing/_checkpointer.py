"""Checkpointers: where weights come from, where checkpoints go."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.training.checkpointing._directories import (
    ResumePoint,
    check_output_dir,
    find_resume_point,
    new_directory,
    prune,
)
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._export import carry_files, write_adapter, write_config, write_model
from torchtune.training.checkpointing._gguf import GGUFFile
from torchtune.training.checkpointing._gguf_tokenizer import write_tokenizer
from torchtune.training.checkpointing._legacy import LegacyInterface
from torchtune.training.checkpointing._load import ADAPTER_FILE, initialize_rest, load_adapter, load_base
from torchtune.training.checkpointing._model_type import ModelType
from torchtune.training.checkpointing._sources import Source, find_files, open_source, resolve_files
from torchtune.training.checkpointing._state import load_state, save_state

# Folder of the adapter inside a checkpoint that also holds the merged model; loaders would take it for theirs else.
ADAPTER_DIR = "adapter"


class FullModelHFCheckpointer(LegacyInterface):
    """Reads the weights of a folder, and writes checkpoints that Hugging Face's libraries load.

    Reads safetensors (one file or shards), torch files, Meta's consolidated files and GGUF; whose names the tensors
    bear is seen from the names. Everything streams: besides the model no more than one file is held.

    Args:
        checkpoint_dir: folder with the weights, usually as downloaded.
        checkpoint_files: names of the files of weights, or ``{filename_format, max_filename}``; found by default.
        model_type: name of a :class:`ModelType`; the model says itself what it is, this is checked against it.
        output_dir: where checkpoints go: ``epoch_N`` or ``step_N`` below it.
        adapter_checkpoint: name of an adapter's file in older checkpoints.
        recipe_checkpoint: accepted for older configs; the newest complete checkpoint is found by itself.
        resume_from_checkpoint: accepted for older configs; the recipe's setting of that name decides.
        safe_serialization: accepted for older configs; safetensors are always written.
        should_load_recipe_state: for :meth:`load_checkpoint`: read the newest checkpoint of ``output_dir``.
        keep_last_n_checkpoints: older ones are removed after each save; all are kept by default.
        enable_dcp: accepted for older configs; reading and writing stream anyway.

    Raises:
        CheckpointError: ``model_type`` or ``keep_last_n_checkpoints`` is no such thing.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        adapter_checkpoint: str | None = "adapter_model.pt",
        recipe_checkpoint: str | None = "recipe_state.pt",
        resume_from_checkpoint: bool = False,
        safe_serialization: bool = True,
        should_load_recipe_state: bool = False,
        *,
        keep_last_n_checkpoints: int | None = None,
        enable_dcp: bool = False,
    ) -> None:
        if keep_last_n_checkpoints is not None and keep_last_n_checkpoints < 1:
            raise CheckpointError(f"keep_last_n_checkpoints is {keep_last_n_checkpoints}: it must be at least 1.")
        if model_type is not None and model_type not in ModelType.__members__:
            raise CheckpointError(f"model_type: '{model_type}' is none of {', '.join(ModelType.__members__)}.")
        self.checkpoint_dir = Path(checkpoint_dir)
        self.checkpoint_files = checkpoint_files
        self.model_type = None if model_type is None else ModelType[model_type]
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.adapter_checkpoint = adapter_checkpoint
        self.should_load_recipe_state = should_load_recipe_state
        self.keep_last_n_checkpoints = keep_last_n_checkpoints

    def source(self) -> Source:
        """The files of weights, opened."""
        return open_source(resolve_files(self.checkpoint_dir, self.checkpoint_files))

    def load_model(self, model: nn.Module, *, device: torch.device | str = "cpu") -> None:
        """Fill ``model`` from ``checkpoint_dir``; parameters on the meta device become real on ``device``.

        Parameters that conversions added are read from an adapter in the folder if there is one, and initialised
        otherwise.

        Args:
            model: built by :mod:`torchtune.models`, on the meta device or real; its dtype is kept.
            device: see above.

        Raises:
            CheckpointError: files are missing or corrupt, or do not fit the model.
        """
        self._check_model_type(model)
        device = torch.device(device)
        load_base(model, self.source(), device)
        initialize_rest(model, device)

    def check_output_dir(self, *, resume: bool) -> None:
        """Refuse an output folder that would overwrite something; call it before anything is loaded.

        Raises:
            CheckpointError: there is none, it is inside ``checkpoint_dir``, or it holds a run and ``resume`` is False.
        """
        check_output_dir(self._output_dir(), self.checkpoint_dir, resume=resume)

    def find_resume_point(self) -> ResumePoint | None:
        """The newest complete checkpoint to go on from; ``None`` (and a warning) if there is none.

        Raises:
            CheckpointError: the run is finished.
        """
        return find_resume_point(self._output_dir())

    def resume(self, point: ResumePoint, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Put the trained weights of ``point`` into ``model`` and the rest into the values of ``state``.

        Args:
            point: from :meth:`find_resume_point`.
            model: after :meth:`load_model`.
            state: as it was given to :meth:`save`: objects with ``load_state_dict``, or dicts, updated in place.

        Raises:
            CheckpointError: the checkpoint is of another model or kind of run.
        """
        device = next(model.parameters()).device
        for folder in (point.path, point.path / ADAPTER_DIR):
            if (folder / ADAPTER_FILE).is_file():
                load_adapter(model, folder, device)
                break
        else:
            load_base(model, open_source(find_files(point.path)), device)
        load_state(state, point.path)

    def save(
        self,
        name: str,
        model: nn.Module,
        *,
        state: Mapping[str, Any] | None = None,
        cfg: Any = None,
        adapter_only: bool = False,
        merge: bool = False,
        max_shard_bytes: int = 5 * 10**9,
    ) -> Path:
        """Write ``output_dir/name`` whole or not at all, then remove what ``keep_last_n_checkpoints`` lets go.

        Args:
            name: ``epoch_N`` or ``step_N``.
            model: its weights go under Hugging Face names, or with ``adapter_only`` just its adapter.
            state: what a resume needs besides the weights; left out of the last checkpoint of a run.
            cfg: settings of the run, saved as ``torchtune_config.yaml``.
            adapter_only: write no base weights.
            merge: add the adapter to the base weights; it is also written by itself, into ``adapter/``.
            max_shard_bytes: larger models are split into shards.

        Returns:
            the directory.

        Raises:
            UserError: the disk is full or may not be written to; what was saved before is untouched.
        """
        with new_directory(self._output_dir(), name) as folder:
            if not adapter_only:
                write_model(model, folder, merge=merge, max_shard_bytes=max_shard_bytes)
                write_config(model, folder, self.checkpoint_dir)
            if adapter_only or merge:
                adapter = folder if adapter_only else folder / ADAPTER_DIR
                adapter.mkdir(exist_ok=True)
                write_adapter(model, adapter, self._base_name())
            self._carry(folder)
            if cfg is not None:
                from torchtune.config import save_config

                save_config(cfg, folder / "torchtune_config.yaml")
            if state is not None:
                save_state(state, folder)
        prune(self._output_dir(), self.keep_last_n_checkpoints)
        return self._output_dir() / name

    def _carry(self, folder: Path) -> None:
        carry_files(self.checkpoint_dir, folder)
        paths = resolve_files(self.checkpoint_dir, self.checkpoint_files)
        if paths[0].suffix == ".gguf" and not (folder / "tokenizer.json").exists():
            write_tokenizer(GGUFFile(paths[0]), folder)

    def _base_name(self) -> str:
        """Repository of the base if `tune download` noted it, else its folder."""
        path = self.checkpoint_dir / "original_repo_id.json"
        if path.is_file():
            return json.loads(path.read_text())["repo_id"]
        return str(self.checkpoint_dir.resolve())

    def _output_dir(self) -> Path:
        if self.output_dir is None:
            raise CheckpointError("checkpointer.output_dir is missing: say where checkpoints go.")
        return self.output_dir

    def _check_model_type(self, model: nn.Module) -> None:
        """``model_type`` chooses weight names in older configs: it must choose those of the model's own family."""
        spec = getattr(model, "spec", None)
        if self.model_type is None or spec is None or self.model_type.name in spec.model_types:
            return
        from torchtune.models import ModelError, get_spec

        try:
            named = get_spec(self.model_type.value)
        except ModelError:
            named = None
        if named is None or named.weight_map("hf") != spec.weight_map("hf"):
            raise CheckpointError(
                f"model_type: {self.model_type.name} is not the kind of the model, which is '{spec.name}': leave "
                "model_type out, or use a builder of that kind."
            )


class FullModelMetaCheckpointer(FullModelHFCheckpointer):
    """The same, for Meta's consolidated files: kept so that configs that name it run. What it writes is HF's."""


class FullModelTorchTuneCheckpointer(FullModelHFCheckpointer):
    """The same, for files with this library's own names. What it writes is HF's."""
