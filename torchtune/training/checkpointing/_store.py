"""``CheckpointStore``: the models of a run, where their weights come from, and the folder of its checkpoints."""

import json
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchtune.models import build
from torchtune.modules.peft import owned_parameters
from torchtune.training.checkpointing._adapter import ADAPTER_DIR, ADAPTER_FILE, load_adapter
from torchtune.training.checkpointing._contents import Contents, check_contents, contents_of
from torchtune.training.checkpointing._directories import (
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
from torchtune.training.checkpointing._export import MAX_SHARD_BYTES
from torchtune.training.checkpointing._export_model import export_model
from torchtune.training.checkpointing._full_weights import FullWeights
from torchtune.training.checkpointing._load import identity, initialize_rest, load_base
from torchtune.training.checkpointing._model_source import ModelSource
from torchtune.training.checkpointing._models_of_run import ModelsOfRun
from torchtune.training.checkpointing._open_source import open_source
from torchtune.training.checkpointing._owned_files import OWNED_INDEX
from torchtune.training.checkpointing._quantize import write_compressed
from torchtune.training.checkpointing._resumed_settings import check_resumed_settings
from torchtune.training.checkpointing._saving import Job, Saver
from torchtune.training.checkpointing._sources import find_files
from torchtune.training.checkpointing._state import STATE_DIR, STRUCTURE, load_state, local_state, optimizers_of
from torchtune.training.parallel._ranks import Ranks
from torchtune.training.parallel._shards import reshard
from torchtune.utils import FolderLock, UserError, doing, get_logger

if TYPE_CHECKING:
    from torchtune.training.quantization import Quantizer

POLICY = "policy"
# Names of folders and prefixes in a checkpoint, which no model may have.
_RESERVED = (STATE_DIR, ADAPTER_DIR, "logs", "original")

# One model, the policy, or models by name, in a mapping or as one module (``nn.ModuleDict``).
Models = nn.Module | Mapping[str, nn.Module]


class CheckpointStore:
    """Reads the weights of the models of a run, and saves and resumes its checkpoints.

    A model has a name: ``policy``, the default, is the model that a run is about; ``reference``, ``value``,
    ``teacher`` or any other name stands beside it. Each has a source. A model that is passed to :meth:`save` is
    trained: the policy is saved in the checkpoint folder itself, every other one in a subfolder of its name, under one
    completion marker. A model with a source that is not saved is frozen: checkpoints record a fingerprint of its
    weights, and a resume with other weights is refused.

    All ranks call every method; of sharded models each reads and writes its own shard.

    Args:
        sources: a source for each model, by name; a mapping holds the arguments of :class:`ModelSource`.
        output_dir: folder of the checkpoints, ``epoch_N`` and ``step_N``; needed to save and to resume.
        keep_last_n_checkpoints: number of checkpoints to keep. By default all ``epoch_N`` are kept, and the last three
            ``step_N``.

    Raises:
        CheckpointError: an argument is invalid.

    Example:
        >>> store = torchtune.training.CheckpointStore({"policy": {"checkpoint_dir": checkpoint}}, folder / "run")
        >>> store.load_model(model)
        >>> store.save("epoch_0", model).name
        'epoch_0'
        >>> store.close()
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        output_dir: str | Path | None = None,
        *,
        keep_last_n_checkpoints: int | None = None,
    ) -> None:
        if keep_last_n_checkpoints is not None and keep_last_n_checkpoints < 1:
            raise CheckpointError(f"keep_last_n_checkpoints is {keep_last_n_checkpoints}: it must be at least 1.")
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.keep_last_n_checkpoints = keep_last_n_checkpoints
        self.sources: dict[str, ModelSource] = {}
        for name, source in sources.items():
            if isinstance(source, Mapping):
                source = ModelSource(**source, adapter_dirs=[] if self.output_dir is None else [self.output_dir])
            self.add_source(name, source)

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks(CheckpointError)

    @cached_property
    def lock(self) -> FolderLock:
        """Lock of the output folder."""
        return FolderLock(self.require_output_dir())

    @cached_property
    def _saver(self) -> Saver:
        return Saver(self._ranks, self.lock)

    def add_source(self, name: str, source: Any) -> None:
        """Add a model to the run.

        Args:
            name: of the model, for example ``"reference"``.
            source: a :class:`ModelSource`, or a checkpointer or store, of which the policy's source is taken.

        Raises:
            CheckpointError: the name is taken or reserved, or ``source`` is no source.
        """
        source = getattr(source, "store", source)
        if isinstance(source, CheckpointStore):
            source = source.sources.get(POLICY)
        if not isinstance(source, ModelSource):
            raise CheckpointError(f"The source of '{name}' is a {type(source).__name__}: give a checkpointer.")
        if name in self.sources:
            raise CheckpointError(f"The run already has a model '{name}': choose another name.")
        if not name.isidentifier() or name in _RESERVED:
            raise CheckpointError(f"A model cannot be called '{name}': use a word such as reference or value.")
        self.sources[name] = source

    def source(self, name: str = POLICY) -> ModelSource:
        """The source of a model. Raises ``CheckpointError`` if it has none."""
        if name not in self.sources:
            known = ", ".join(self.sources) or "none"
            raise CheckpointError(f"The model '{name}' has no source (there are: {known}): call add_source first.")
        return self.sources[name]

    @doing("loading the checkpoint")
    def load_model(
        self,
        model: nn.Module,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        name: str = POLICY,
        whole: bool = False,
    ) -> None:
        """Fill ``model`` from its source; parameters on the meta device become real on ``device``.

        Parameters that conversions added are read from ``adapter_checkpoint`` if it is given, else from an adapter in
        PEFT's layout in ``checkpoint_dir`` if there is one, else their modules initialize them.

        Args:
            model: built by :mod:`torchtune.models`, on the meta device or real, sharded or not.
            device: see above.
            dtype: of parameters that become real; their own by default.
            name: which source to read.
            whole: raise where the files lack a parameter: a model that is not trained cannot begin with a new one.

        Raises:
            CheckpointError: files are missing or corrupt, or do not fit the model.
        """
        source, device, loaded = self.source(name), torch.device(device), set()
        source.check_model_type(model)
        reshard(model)
        with self._ranks.together():
            loaded = source.read(model, device, dtype)
            if whole and (new := [key for key, _ in model.named_parameters() if key not in loaded]):
                raise CheckpointError(
                    f"{source.checkpoint_dir} has no '{new[0]}', which the '{name}' model needs and this run does not "
                    "train: give the folder of a model that was trained with it."
                )
            # Now: the folder may be gone when a checkpoint records it.
            if name != POLICY:
                _ = source.fingerprint
            elif owned_parameters(model):
                _ = source.base_fingerprint
        with self._ranks.same_randomness():
            initialize_rest(model, loaded, device, dtype)

    def check_model(self, model: nn.Module, *, name: str = POLICY) -> None:
        """Check whether :meth:`load_model` can fill ``model``: files, family, names and shapes; no tensor data is read.

        Args:
            model: on the meta device, not sharded.
            name: which source to read.

        Raises:
            CheckpointError: see :meth:`load_model`; truncated files are found when they are read.
        """
        self.source(name).check(model)

    def check_contents(self, models: Models, *, contents: Contents = "model", resumable: bool = True) -> None:
        """Check whether :meth:`save` would write every trained parameter; call it before training.

        Args:
            models: converted, on any device.
            contents: see :meth:`save`.
            resumable: whether checkpoints hold the training state too, so that a resume must find every trained
                parameter.

        Raises:
            CheckpointError: a parameter requires a gradient and would not be written.
        """
        for name, model in _by_name(models).items():
            check_contents(model, contents_of(contents, name), resumable=resumable)

    def check_output_dir(self, *, resume: bool) -> None:
        """Check that saving would overwrite nothing; call it before anything is loaded.

        Raises:
            UserError: there is no output folder, it is inside a source's folder, holds a run although ``resume`` is
                False, or is in use.
        """
        output_dir = self.require_output_dir()
        self._ranks.first(self.lock.refuse_used)
        for source in self.sources.values():
            self._ranks.first(partial(check_output_dir, output_dir, source.checkpoint_dir, resume=resume))

    def lock_output_dir(self) -> None:
        """Keep other runs out of the output folder until :meth:`close`, or until the process ends.

        The lock of a killed run is taken over: at once on the same machine, else after a minute without a heartbeat.
        Without this call, every save and every search for a checkpoint locks the folder while it lasts.

        Raises:
            UserError: another run holds the lock, or the folder cannot be written to.
        """
        self.require_output_dir()
        self._ranks.first(lambda: self.lock.acquire())

    def open_output_dir(self, cfg: Any, *, resume: bool) -> ResumePoint | None:
        """Take hold of the output folder until :meth:`close`; call it before anything is loaded.

        Args:
            cfg: settings of this run.
            resume: whether it goes on with the run whose checkpoints are there.

        Returns:
            what to resume from; ``None`` for a new run.

        Raises:
            UserError: see :meth:`check_output_dir`, :meth:`lock_output_dir` and :meth:`find_resume_point`.
        """
        self.check_output_dir(resume=resume)
        self.lock_output_dir()
        return self.find_resume_point(cfg) if resume else None

    def find_resume_point(self, cfg: Any = None) -> ResumePoint | None:
        """The newest complete and undamaged checkpoint; ``None``, and a warning, if there is no checkpoint.

        The files that a resume needs are compared with their checksums, each rank reads some of them. If a checkpoint
        is damaged, an error is logged and the one before it is taken.

        Args:
            cfg: settings of this run; differences from the checkpoint's are logged, or refused.

        Raises:
            CheckpointError: the run is finished, every checkpoint is damaged, or it cannot be resumed with these
                settings, frozen models or base weights.
            UserError: another run holds the folder.
        """
        output_dir, was_locked, keep = self.require_output_dir(), self.lock.is_held, False

        def begin() -> list[Path]:
            if output_dir.is_dir():
                self.lock.acquire()
            return resume_candidates(output_dir)

        try:
            candidates = self._ranks.first(begin)
            for number, path in enumerate(candidates):
                faults = []
                with self._ranks.together():
                    files = marked_files(path, everything=False)[self._ranks.rank :: self._ranks.size]
                    faults = damage(path, files)
                faults = [fault for found in self._ranks.gather(faults) for fault in found]
                if not faults:
                    point = self._ranks.first(partial(resume_point, path))
                    with self._ranks.together():
                        if cfg is not None:
                            check_resumed_settings(cfg, path)
                        ModelsOfRun.read(path).check_sources(self.sources, path)
                    keep = was_locked
                    return point
                self._ranks.first(partial(refuse_damaged, path, faults, candidates[number + 1 :]))
            keep = was_locked
            return None
        finally:
            if not keep:  # also on errors: there will be no run
                self.lock.release()

    def check_resume(self, cfg: Any) -> None:
        """:meth:`find_resume_point` of the newest complete checkpoint, without the lock and without checksums."""
        for newest in complete_directories(self.require_output_dir())[-1:]:
            resume_point(newest)
            check_resumed_settings(cfg, newest)
            ModelsOfRun.read(newest).check_sources(self.sources, newest)

    @doing("resuming")
    def resume(self, point: ResumePoint, models: Models, state: Mapping[str, Any]) -> None:
        """Load the trained weights of ``point`` into the models, and the rest into the values of ``state``.

        Args:
            point: from :meth:`find_resume_point`.
            models: after :meth:`load_model`, the same as in :meth:`save`.
            state: the same as in :meth:`save`: objects with ``load_state_dict``, or dicts, updated in place.

        Raises:
            CheckpointError: the checkpoint is of other models or of another kind of run.
        """
        parameters, models = _parameters(models), _by_name(models)
        record = ModelsOfRun.read(point.path)
        record.check_trained(models, point.path)
        if self.output_dir is not None:
            self._saver.wait()
        files = {name: _weights_to_resume(model, point.path / _folder(name)) for name, model in models.items()}
        for model in models.values():
            reshard(model)
        with self._ranks.together():
            record.check_sources(self.sources, point.path)
            for name, model in models.items():
                device, path = next(model.parameters()).device, files[name]
                if owned_parameters(model):
                    load_adapter(model, path, device)
                else:
                    load_base(model, open_source(find_files(path)), device)
            load_state(state, parameters, point.path, self._ranks.rank)

    def save(
        self,
        name: str,
        models: Models,
        *,
        contents: Contents = "model",
        state: Mapping[str, Any] | None = None,
        cfg: Any = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        async_save: bool = False,
        optional: bool = False,
    ) -> Path:
        """Write ``output_dir/name``, atomically, then remove what ``keep_last_n_checkpoints`` no longer keeps.

        Args:
            name: ``epoch_N`` or ``step_N``.
            models: the trained models: the policy, or several by name.
            contents: what is written of a model: ``"model"``, its weights without adapters; ``"adapter"``, in PEFT's
                layout; ``"merged"``, its weights with the adapter merged into them. ``("adapter", "merged")`` writes
                both, the adapter into the subfolder ``adapter``. A mapping chooses by the name of the model.
            state: what a resume needs besides the weights; ``None`` for the last checkpoint of a run.
            cfg: settings of the run, saved as ``torchtune_config.yaml``.
            max_shard_bytes: larger models are split into several files.
            async_save: write in the background. The tensors are first copied to host memory: before this returns, or,
                if ``state`` has optimizers and no weight needs a conversion, before the next step of an optimizer; do
                not change the weights in any other way until then. The next save and :meth:`close` wait for the
                writing, and raise its errors.
            optional: if writing fails, log a warning and go on without this checkpoint.

        Returns:
            The checkpoint folder.

        Raises:
            UserError: a trained parameter would not be written, or the disk is full or not writable; earlier
                checkpoints stay as they are.
        """
        self._saver.wait()
        for model in _by_name(models).values():  # a validation leaves gathered parameters in the place of the shards
            reshard(model)
        parameters, models, exports = _parameters(models), _by_name(models), []
        for model_name, model in models.items():
            chosen = contents_of(contents, model_name)
            check_contents(model, chosen, resumable=state is not None)
            source, folder = self.source(model_name), _folder(model_name)
            exports.append(export_model(model, source, chosen, self._ranks, max_shard_bytes, folder))
        saved = None if state is None else local_state(state, parameters, self._ranks)
        adapted = [n for n, export in zip(models, exports, strict=True) if "adapter" in export.contents]
        record = ModelsOfRun.of(models, self.sources, adapted if state is not None else ())

        def write_small_files(folder: Path) -> None:
            for export in exports:
                export.write_small_files(folder)
            if cfg is not None:
                from torchtune.config import save_config

                save_config(cfg, folder / "torchtune_config.yaml")
            if saved is not None:
                (folder / STATE_DIR).mkdir(exist_ok=True)
                (folder / STATE_DIR / STRUCTURE).write_text(json.dumps(saved.structure), encoding="utf-8")
                record.write(folder)

        output_dir = self.require_output_dir()
        own, agreed = (None, b"") if saved is None else (saved.file, saved.agreed)
        files = [file for export in exports for file in export.files]
        job = Job(output_dir, name, files, own, agreed, write_small_files, self.keep_last_n_checkpoints, optional)
        # All ranks make these weights together, which they cannot do while training goes on.
        together = any("merged" in export.contents for export in exports) or any(
            FullWeights(model).stored for model in models.values()
        )
        optimizers = [] if together else [found for item in (state or {}).items() for _, found in optimizers_of(*item)]
        self._saver.save(job, in_background=async_save, optimizers=optimizers)
        return output_dir / name

    def save_quantized(self, name: str, model: nn.Module, quantizer: "Quantizer") -> Path:
        """Quantise the saved checkpoint ``name`` into ``output_dir/quantized``, one tensor at a time on rank 0.

        Args:
            name: of a checkpoint that holds whole weights, merged if the model has adapters.
            model: what was saved.
            quantizer: decides values and layout.

        Returns:
            The folder.

        Raises:
            UserError: see :func:`torchtune.training.quantize_checkpoint`; the checkpoint stays as it is.
        """
        self._saver.wait()
        spec, description = identity(model)
        output_dir = self.require_output_dir()
        folder = output_dir / "quantized"

        def write() -> None:
            with torch.device("meta"):
                plain = build(description, spec)
            write_compressed(ModelSource(output_dir / name), plain, quantizer, folder)
            get_logger().info(f"{folder} holds {name} quantised ({quantizer.mode}).")

        self._ranks.first(write)
        return folder

    def close(self) -> None:
        """Wait until everything is written, and release the output folder.

        Raises:
            UserError: writing failed; while another error is being raised, this one is only logged.
        """
        if self.output_dir is None:
            return
        is_raising = sys.exc_info()[0] is not None
        try:
            self._saver.close()
        except (UserError, OSError) as error:
            if not is_raising:
                raise
            get_logger().warning(f"The last checkpoint was not written: {error}")
        finally:
            self.lock.release()

    def require_output_dir(self) -> Path:
        """The output folder. Raises ``CheckpointError`` if there is none."""
        if self.output_dir is None:
            raise CheckpointError("checkpointer.output_dir is missing: say where checkpoints go.")
        return self.output_dir


def _by_name(models: Models) -> dict[str, nn.Module]:
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleDict):
        return {POLICY: models}
    if not models:
        raise CheckpointError("There is no model to save or to resume: give the policy, or models by name.")
    return dict(models.items())


def _folder(name: str) -> str:
    """Subfolder of a model in a checkpoint; the policy's is the checkpoint itself."""
    return "" if name == POLICY else name


def _parameters(models: Models) -> dict[str, nn.Parameter]:
    """The parameters of all models; names of other models than the policy start with the model's."""
    if isinstance(models, nn.ModuleDict):  # as an optimizer of it names them
        return dict(models.named_parameters())
    return {
        parameter_name if name == POLICY else f"{name}.{parameter_name}": parameter
        for name, model in _by_name(models).items()
        for parameter_name, parameter in model.named_parameters()
    }


def _weights_to_resume(model: nn.Module, folder: Path) -> Path:
    """What a resume reads of a model: a file of its adapter, or the folder of its weights."""
    paths = [place / name for place in (folder, folder / ADAPTER_DIR) for name in (ADAPTER_FILE, OWNED_INDEX)]
    adapters = [path for path in paths if path.is_file()]
    has_adapter = bool(owned_parameters(model))
    if has_adapter != bool(adapters):
        theirs, ours = ("an adapter", "has none") if adapters else ("a whole model", "has an adapter")
        raise CheckpointError(
            f"{folder} holds {theirs}, but the model of this run {ours}: resume with the saved torchtune_config.yaml."
        )
    return adapters[0] if has_adapter else folder
