"""Checkpointers: where weights come from, where checkpoints go."""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.models import ModelError, get_spec
from torchtune.training.checkpointing._adapter import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_DIR,
    ADAPTER_FILE,
    adapter_beside_base,
    adapter_parts,
    find_adapter,
    load_adapter,
)
from torchtune.training.checkpointing._contents import check_contents
from torchtune.training.checkpointing._directories import (
    MARKER,
    ResumePoint,
    check_output_dir,
    complete_directories,
    damage,
    marked_files,
    refuse_damaged,
    resume_candidates,
    resume_point,
)
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._export import MAX_SHARD_BYTES, carry_files, config_of_model, model_parts, shards
from torchtune.training.checkpointing._full_weights import FullWeights, owned_names
from torchtune.training.checkpointing._gguf import GGUFFile
from torchtune.training.checkpointing._gguf_tokenizer import special_ids, tokenizer_files
from torchtune.training.checkpointing._legacy import LegacyInterface
from torchtune.training.checkpointing._load import (
    check_base,
    check_config,
    check_description,
    identity,
    initialize_rest,
    load_base,
    read_json,
)
from torchtune.training.checkpointing._model_type import ModelType
from torchtune.training.checkpointing._open_source import TextPart, open_source
from torchtune.training.checkpointing._ranks import Ranks, reshard
from torchtune.training.checkpointing._resumed_settings import check_resumed_settings
from torchtune.training.checkpointing._safetensors_file import tensor_file
from torchtune.training.checkpointing._saving import Job, Saver
from torchtune.training.checkpointing._sources import SAFETENSORS_INDEX, Source, find_files, resolve_files
from torchtune.training.checkpointing._state import STATE_DIR, STRUCTURE, load_state, optimizers_of, state_parts
from torchtune.utils import FolderLock, UserError, doing, get_logger, refuse_foreign, write_json


class FullModelHFCheckpointer(LegacyInterface):
    """Reads the weights of a folder, and writes checkpoints that Hugging Face's libraries load.

    Reads safetensors (one file or shards), torch files, Meta's consolidated files and GGUF; whose names the tensors
    bear is seen from the names. Everything streams: besides the model no more than one file is held.

    Args:
        checkpoint_dir: folder with the weights, usually as downloaded.
        checkpoint_files: names of the files of weights, or ``{filename_format, max_filename}``; found by default.
        model_type: name of a :class:`ModelType`; the model says itself what it is, this is checked against it.
        output_dir: where checkpoints go: ``epoch_N`` or ``step_N`` below it.
        adapter_checkpoint: adapter to start from: a folder in PEFT's layout, or a file in it, or the
            ``adapter_model.pt`` of an older checkpoint; as it stands, or below ``checkpoint_dir`` or ``output_dir``.
        recipe_checkpoint: accepted for older configs; the newest complete checkpoint is found by itself.
        resume_from_checkpoint: accepted for older configs; the recipe's setting of that name decides.
        safe_serialization: accepted for older configs; safetensors are always written.
        should_load_recipe_state: for :meth:`load_checkpoint`: read the newest checkpoint of ``output_dir``.
        keep_last_n_checkpoints: older ones are removed after each save. By default those of epochs are all kept, and
            the last three of those by steps.
        enable_dcp: accepted for older configs; reading and writing stream anyway.
        text_only: of a checkpoint with several parts (vision, audio, text) write the text decoder as a model of its
            own. By default the other parts are written with it, unchanged.

    Raises:
        CheckpointError: ``model_type`` or ``keep_last_n_checkpoints`` is no such thing.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        adapter_checkpoint: str | None = None,
        recipe_checkpoint: str | None = None,
        resume_from_checkpoint: bool = False,
        safe_serialization: bool = True,
        should_load_recipe_state: bool = False,
        *,
        keep_last_n_checkpoints: int | None = None,
        enable_dcp: bool = False,
        text_only: bool = False,
    ) -> None:
        if keep_last_n_checkpoints is not None and keep_last_n_checkpoints < 1:
            raise CheckpointError(f"keep_last_n_checkpoints is {keep_last_n_checkpoints}: it must be at least 1.")
        if model_type is not None and model_type not in ModelType.__members__:
            raise CheckpointError(f"model_type: '{model_type}' is none of {', '.join(ModelType.__members__)}.")
        self.checkpoint_dir = Path(checkpoint_dir)
        refuse_foreign(self.checkpoint_dir, "checkpointer.checkpoint_dir")
        self.checkpoint_files = checkpoint_files
        self.model_type = None if model_type is None else ModelType[model_type]
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.adapter_checkpoint = adapter_checkpoint
        self.should_load_recipe_state = should_load_recipe_state
        self.keep_last_n_checkpoints = keep_last_n_checkpoints
        self.text_only = text_only
        # Of a GGUF file: what a save writes besides the weights, by name, and what it adds to config.json.
        self._made_files: dict[str, Any] = {}
        self._made_ids: dict[str, int] = {}

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks()

    @cached_property
    def _lock(self) -> FolderLock:
        return FolderLock(self._output_dir())

    @cached_property
    def _whole(self) -> TextPart | None:
        """The checkpoint that the text decoder is a part of, if its other parts are to be written too."""
        config = self.checkpoint_dir / "config.json"
        if self.text_only or not config.is_file() or "text_config" not in read_json(config):
            return None
        source = self.source()
        return source if isinstance(source, TextPart) else None

    @cached_property
    def _saver(self) -> Saver:
        return Saver(self._ranks, self._lock)

    def source(self) -> Source:
        """The files of weights, opened."""
        return open_source(resolve_files(self.checkpoint_dir, self.checkpoint_files))

    @doing("loading the checkpoint")
    def load_model(
        self, model: nn.Module, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        """Fill ``model`` from ``checkpoint_dir``; parameters on the meta device become real on ``device``.

        All ranks call it; of a sharded model each reads its own part, straight into place.

        Parameters that conversions added are read from ``adapter_checkpoint`` if it is given, else from an adapter
        in PEFT's layout in ``checkpoint_dir`` if there is one, and initialised by their modules otherwise.

        Args:
            model: built by :mod:`torchtune.models`, on the meta device or real.
            device: see above.
            dtype: of the parameters that become real; theirs by default.

        Raises:
            CheckpointError: files are missing or corrupt, or do not fit the model.
        """
        self._check_model_type(model)
        reshard(model)
        device, own, adapter = torch.device(device), owned_names(model), None
        with self._ranks.together():
            source, _ = self.source(), self._whole  # the latter now, while its folder is there
            if isinstance(source, GGUFFile):
                check_description(model, source.description, source.path)
                if not (self.checkpoint_dir / "tokenizer.json").exists():
                    self._made_files, self._made_ids = tokenizer_files(source), special_ids(source)
            else:
                check_config(model, self.checkpoint_dir / "config.json")
            load_base(model, source, device, dtype)
            model.adapter_init = None
            adapter = self._adapter_file(wanted=bool(own))
            if adapter is not None:
                load_adapter(model, adapter, device, dtype)
        loaded = {name for name, _ in model.named_parameters() if adapter is not None or name not in own}
        with self._ranks.same_randomness():
            initialize_rest(model, loaded, device, dtype)

    def check_model(self, model: nn.Module) -> None:
        """Find out whether :meth:`load_model` can fill ``model``: files, family, names and shapes; no data are read.

        Args:
            model: on the meta device, not split.

        Raises:
            CheckpointError: see :meth:`load_model`; files that are cut are found out when they are read.
        """
        self._check_model_type(model)
        source = self.source()
        if isinstance(source, GGUFFile):
            check_description(model, source.description, source.path)
        else:
            check_config(model, self.checkpoint_dir / "config.json")
        check_base(model, source)
        own = owned_names(model)
        self._adapter_file(wanted=bool(own))

    def _adapter_file(self, *, wanted: bool) -> Path | None:
        if self.adapter_checkpoint is None:
            return adapter_beside_base(self.checkpoint_dir, wanted=wanted)
        folders = [Path(), self.checkpoint_dir, *([self.output_dir] if self.output_dir is not None else [])]
        candidates = [folder / self.adapter_checkpoint for folder in folders]
        return find_adapter(next((path for path in candidates if path.exists()), candidates[-1]))

    def check_output_dir(self, *, resume: bool) -> None:
        """Refuse an output folder that would overwrite something; call it before anything is loaded.

        Raises:
            UserError: there is none, it is inside ``checkpoint_dir``, holds a run without ``resume``, or is in use.
        """
        output_dir = self._output_dir()
        self._ranks.first(self._lock.refuse_used)
        self._ranks.first(lambda: check_output_dir(output_dir, self.checkpoint_dir, resume=resume))

    def lock_output_dir(self) -> None:
        """Keep other runs out of the output folder until :meth:`close`, or until the process ends.

        What a killed run left locked is taken over: at once on the same machine, or after a minute without a sign of
        life. Without this call, every save and search for a checkpoint locks the folder for as long as it takes.

        Raises:
            UserError: another run has it, or it cannot be written to.
        """
        self._output_dir()
        self._ranks.first(lambda: self._lock.acquire())

    def check_contents(self, model: nn.Module, *, adapter_only: bool = False) -> None:
        """Refuse a model of which :meth:`save` would not write all that is trained; call it before training.

        Args:
            model: converted, on any device.
            adapter_only: whether resumable checkpoints hold the adapter alone.

        Raises:
            CheckpointError: a parameter requires a gradient and would not be written.
        """
        check_contents(model, adapter_only=adapter_only)

    def find_resume_point(self, cfg: Any = None) -> ResumePoint | None:
        """The newest complete checkpoint that is whole; ``None`` (and a warning) if there is none to go on from.

        What a resume needs is read and compared with the checksums of the save, each rank a share of the files. From a
        damaged checkpoint the one before takes over, which is said as an error.

        Args:
            cfg: settings of this run: what differs from the checkpoint's is logged, or refused.

        Raises:
            CheckpointError: the run is finished, no checkpoint is whole, or it cannot go on with these settings.
            UserError: another run has the folder.
        """
        output_dir, held, keep = self._output_dir(), self._lock.is_held, False

        def begin() -> list[Path]:
            if output_dir.is_dir():
                self._lock.acquire()
            return resume_candidates(output_dir)

        try:
            candidates = self._ranks.first(begin)
            for number, path in enumerate(candidates):
                mine, faults = [], []
                with self._ranks.together():
                    mine = marked_files(path, everything=False)[self._ranks.rank :: self._ranks.size]
                    faults = damage(path, mine)
                faults = [fault for found in self._ranks.gather(faults) for fault in found]
                if not faults:
                    point = self._ranks.first(partial(resume_point, path))
                    with self._ranks.together():
                        if cfg is not None:
                            check_resumed_settings(cfg, path)
                    keep = held
                    return point
                self._ranks.first(partial(refuse_damaged, path, faults, candidates[number + 1 :]))
            keep = held
            return None
        finally:
            if not keep:  # also where it fails, so that there will be no run
                self._lock.release()

    def check_resume(self, cfg: Any) -> None:
        """:meth:`find_resume_point` of the newest complete checkpoint, without the lock and without verifying files."""
        for newest in complete_directories(self._output_dir())[-1:]:
            resume_point(newest)
            check_resumed_settings(cfg, newest)

    @doing("resuming")
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
        own = owned_names(model)
        adapters = [folder for folder in (point.path, point.path / ADAPTER_DIR) if (folder / ADAPTER_FILE).is_file()]
        has_adapter = bool(own)
        if has_adapter != bool(adapters):
            theirs, ours = ("an adapter", "has none") if adapters else ("a whole model", "has an adapter")
            raise CheckpointError(
                f"{point.path} holds {theirs}, but the model of this run {ours}: resume with the saved "
                "torchtune_config.yaml."
            )
        if self.output_dir is not None:
            self._saver.wait()
        reshard(model)
        with self._ranks.together():
            if has_adapter:
                load_adapter(model, adapters[0] / ADAPTER_FILE, device)
            else:
                load_base(model, open_source(find_files(point.path)), device)
            load_state(state, model, point.path, self._ranks.rank)

    def save(
        self,
        name: str,
        model: nn.Module,
        *,
        state: Mapping[str, Any] | None = None,
        cfg: Any = None,
        adapter_only: bool = False,
        merge: bool = False,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        async_save: bool = False,
        optional: bool = False,
    ) -> Path:
        """Write ``output_dir/name`` whole or not at all, then remove what ``keep_last_n_checkpoints`` lets go.

        All ranks call it; of a sharded model each writes its own part.

        Args:
            name: ``epoch_N`` or ``step_N``.
            model: its weights go under Hugging Face names, or with ``adapter_only`` just its adapter.
            state: what a resume needs besides the weights; left out of the last checkpoint of a run.
            cfg: settings of the run, saved as ``torchtune_config.yaml``.
            adapter_only: write no base weights.
            merge: add the adapter to the base weights; it is also written by itself, into ``adapter/``.
            max_shard_bytes: larger models are split into shards.
            async_save: write while training goes on. What is saved is copied to the host first: before this returns,
                or, if there are optimizers in ``state`` and nothing is merged, before the next step of one of them;
                the weights must not be changed otherwise until then. The next save and :meth:`close` wait for the
                writing, and raise what went wrong.
            optional: where it fails, warn and go on without this checkpoint.

        Returns:
            the directory.

        Raises:
            UserError: something that is trained would not be written, or the disk is full or may not be written to;
                what was saved before is untouched.
        """
        self._saver.wait()
        reshard(model)
        # A resume reads the adapter alone, also where the merged model stands beside it.
        check_contents(model, adapter_only=adapter_only or (merge and state is not None), merge=merge)
        files, contents = [], {}
        whole = None if adapter_only or identity(model)[1].is_classifier else self._whole
        if not adapter_only:
            files, index = shards(model_parts(model, self._ranks, merge=merge, whole=whole), max_shard_bytes)
            contents |= {} if index is None else {SAFETENSORS_INDEX: index}
        if adapter_only or merge:
            parts, settings = adapter_parts(model, self._ranks, self._base_name())
            folder = "" if adapter_only else f"{ADAPTER_DIR}/"
            files.append(tensor_file(folder + ADAPTER_FILE, parts))
            contents[folder + ADAPTER_CONFIG_FILE] = settings
        contents["config.json"] = config_of_model(model, self.checkpoint_dir, is_part=whole is not None)
        saved = None if state is None else state_parts(state, model, self._ranks)

        def small(folder: Path) -> None:
            for name, content in contents.items():
                write_json(folder / name, content)
            self._carry(folder)
            if cfg is not None:
                from torchtune.config import save_config

                save_config(cfg, folder / "torchtune_config.yaml")
            if saved is not None:
                (folder / STATE_DIR).mkdir(exist_ok=True)
                (folder / STATE_DIR / STRUCTURE).write_text(json.dumps(saved.structure), encoding="utf-8")

        output_dir = self._output_dir()
        own, agreed = (None, b"") if saved is None else (saved.file, saved.agreed)
        job = Job(output_dir, name, files, own, agreed, small, self.keep_last_n_checkpoints, optional)
        # What is made of a weight by all ranks together is made now, and not while training goes on.
        now = merge or FullWeights(model).stored
        optimizers = [] if now else [found for item in (state or {}).items() for _, found in optimizers_of(*item)]
        self._saver.save(job, behind=async_save, optimizers=optimizers)
        return output_dir / name

    def close(self) -> None:
        """Wait until everything is written, and let other runs into the output folder.

        Raises:
            UserError: that failed; where another error is on its way up, this one is only logged.
        """
        if self.output_dir is None:
            return
        on_its_way = sys.exc_info()[0] is not None
        try:
            self._saver.close()
        except (UserError, OSError) as error:
            if not on_its_way:
                raise
            get_logger().warning(f"The last checkpoint was not written: {error}")
        finally:
            self._lock.release()

    def _carry(self, folder: Path) -> None:
        """Tokenizer, template and generation settings, from the source folder or out of a GGUF file."""
        carry_files(self.checkpoint_dir, folder)
        for name, content in self._made_files.items():
            if not (folder / name).exists():
                write_json(folder / name, content)
        if self._made_ids:
            write_json(folder / "config.json", {**read_json(folder / "config.json"), **self._made_ids})

    def _base_name(self) -> str:
        """Repository of the base if `tune download` noted it and nothing was trained since, else its folder."""
        path = self.checkpoint_dir / "original_repo_id.json"
        if path.is_file() and not (self.checkpoint_dir / MARKER).exists():
            name = read_json(path).get("repo_id")
            if isinstance(name, str):
                return name
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
    """The same, for Meta's consolidated files: kept so that configs that name it run.

    :meth:`save` writes what the other checkpointers write; :meth:`save_checkpoint` writes one file under Meta's names.
    See :class:`FullModelHFCheckpointer` for the arguments.
    """

    _legacy_names = "meta"

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        adapter_checkpoint: str | None = None,
        recipe_checkpoint: str | None = None,
        resume_from_checkpoint: bool = False,
        should_load_recipe_state: bool = False,
        *,
        keep_last_n_checkpoints: int | None = None,
    ) -> None:
        super().__init__(
            checkpoint_dir,
            checkpoint_files,
            model_type,
            output_dir,
            adapter_checkpoint,
            recipe_checkpoint,
            resume_from_checkpoint,
            should_load_recipe_state=should_load_recipe_state,
            keep_last_n_checkpoints=keep_last_n_checkpoints,
        )


class FullModelTorchTuneCheckpointer(FullModelMetaCheckpointer):
    """The same, for files with this library's own names.

    :meth:`save` writes what the other checkpointers write; :meth:`save_checkpoint` writes one file under our names.
    See :class:`FullModelHFCheckpointer` for the arguments.
    """

    _legacy_names = "tune"
