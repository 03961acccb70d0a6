"""``CheckpointStore``: the models of a run, the sources of their weights, and the folder of its checkpoints."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchtune.checkpoints._adapter import ADAPTER_DIR, ADAPTER_FILE, OWNED_INDEX, load_adapter
from torchtune.checkpoints._bucket import Bucket, Uploader
from torchtune.checkpoints._directories import (
    STATE_DIR,
    STRUCTURE,
    check_name,
    check_output_dir,
    complete_directories,
    prune,
)
from torchtune.checkpoints._export import (
    MAX_SHARD_BYTES,
    Contents,
    SaveView,
    contents_of,
    export_model,
)
from torchtune.checkpoints._load import ModelSource, initialize_missing, load_base
from torchtune.checkpoints._model_weights import ModelWeights, spec_and_description
from torchtune.checkpoints._resume import (
    CheckpointSearch,
    ModelsOfRun,
    ResumePoint,
    check_resumed_settings,
    check_same_settings,
    resume_point,
    with_bucket,
)
from torchtune.checkpoints._save import Job, Saver, TensorFile, check_trained_finite
from torchtune.checkpoints._small_files import check_savable_tokenizer, write_extra_files
from torchtune.checkpoints._state import RankState, load_state, optimizers_of, rank_state
from torchtune.checkpoints._weight_files import CheckpointError, find_files, open_weight_files
from torchtune.models import build
from torchtune.modules.peft import owned_parameters
from torchtune.training import share_rng_state
from torchtune.training.parallel import Ranks, reshard
from torchtune.utils import FolderLock, UserError, doing, get_logger, log_rank_zero, sign_of_life

if TYPE_CHECKING:
    from torchtune.modules.low_precision.quantizers import Quantizer

POLICY = "policy"
# Folders and prefixes in a checkpoint; models must have other names.
_RESERVED = (STATE_DIR, ADAPTER_DIR, "logs", "original")

# One model (the policy), or models by name, in a mapping or an ``nn.ModuleDict``.
Models = nn.Module | Mapping[str, nn.Module]


class CheckpointStore:
    """Loads the models of a run, and saves and resumes its checkpoints.

    Every model has a name and a source. The main model is ``policy``, the default name; further models have names such
    as ``reference``, ``value`` or ``teacher``. Models passed to :meth:`save` are trained: the policy is saved in the
    checkpoint folder, every other model in a subfolder with its name; one completion marker covers all. Models with a
    source that are not saved are frozen: checkpoints record a fingerprint of their weights, and a resume verifies it.

    All ranks call every method; each reads and writes its own shards.

    Args:
        sources: source of each model, by name: a :class:`ModelSource`, or a mapping of its arguments.
        output_dir: folder of the checkpoints ``epoch_N`` and ``step_N``; required to save and to resume.
        keep_last_n_checkpoints: number of checkpoints to keep. By default all ``epoch_N`` are kept, and the last three
            ``step_N``.
        upload: folder of an object store, such as ``s3://bucket/run``, to which every checkpoint is uploaded in the
            background; a run with an empty output folder resumes from it.

    Raises:
        CheckpointError: an argument is invalid.

    Example:
        >>> store = torchtune.checkpoints.CheckpointStore({"policy": {"checkpoint_dir": checkpoint}}, folder / "run")
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
        upload: str | None = None,
    ) -> None:
        if keep_last_n_checkpoints is not None and keep_last_n_checkpoints < 1:
            raise CheckpointError(f"keep_last_n_checkpoints is {keep_last_n_checkpoints}: it must be at least 1.")
        self.output_dir = None if output_dir is None else Path(output_dir).expanduser()
        self.keep_last_n_checkpoints = keep_last_n_checkpoints
        self.upload = upload
        self._changed_settings: list[str] = []  # sentences about settings that differ from a resumed checkpoint's
        self.sources: dict[str, ModelSource] = {}
        adapter_dirs = [] if self.output_dir is None else [self.output_dir]
        for name, source in sources.items():
            if isinstance(source, Mapping):
                source = ModelSource(**source, adapter_dirs=adapter_dirs)
            self.add_source(name, source)

    @property
    def store(self) -> "CheckpointStore":
        """This store itself; for copied recipes that read ``checkpointer.store``."""
        return self

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

    @cached_property
    def _bucket(self) -> Bucket | None:
        """Checkpoints in the object store; None without ``upload``. Only rank 0 uses it."""
        return None if self.upload is None else Bucket(self.upload)

    @cached_property
    def _uploader(self) -> Uploader | None:
        if self._bucket is None or self._ranks.rank > 0:
            return None
        return Uploader(self._bucket, self.require_output_dir())

    @cached_property
    def _search(self) -> CheckpointSearch:
        return CheckpointSearch(self.require_output_dir(), self.lock, self._ranks, self._bucket)

    def add_source(self, name: str, source: Any) -> None:
        """Add a model to the run.

        Args:
            name: name of the model, for example ``"reference"``.
            source: a :class:`ModelSource`, or a checkpointer (its policy's source is used).

        Raises:
            CheckpointError: the name exists or is reserved, or ``source`` has the wrong type.
        """
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
        """Return the source of a model. Raises ``CheckpointError`` if it has none."""
        if name not in self.sources:
            names = ", ".join(self.sources) or "none"
            raise CheckpointError(f"The model '{name}' has no source (there are: {names}): call add_source first.")
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
        """Load ``model`` from its source; parameters on the meta device are materialized on ``device``.

        Parameters that conversions added are loaded from ``adapter_checkpoint`` if it is set, otherwise from an adapter
        in PEFT's layout in ``checkpoint_dir``. If there is none either, their modules initialize them.

        Args:
            model: model built by :mod:`torchtune.models`, on the meta device or materialized, sharded or not.
            device: device of materialized parameters.
            dtype: dtype of materialized parameters; unchanged by default.
            name: name of the source.
            whole: raise if the files lack a parameter; set it for frozen models, which must not start with new
                parameters.

        Raises:
            CheckpointError: files are missing or corrupt, or do not fit the model.
        """
        source = self.source(name)
        device = torch.device(device)
        source.check_model_type(model)
        reshard(model)  # frees full parameters that a forward pass has left
        loaded: set[str] = set()
        with self._ranks.raise_on_all():
            loaded = source.load(model, device, dtype)
            missing = [key for key, _ in model.named_parameters() if key not in loaded]
            if whole and missing:
                raise CheckpointError(
                    f"{source.checkpoint_dir} has no '{missing[0]}', which the '{name}' model needs and this run does "
                    "not train: give the folder of a model that was trained with it."
                )
            # Read fingerprints now: the folder may be gone when a checkpoint records them.
            if name != POLICY:
                _ = source.fingerprint
            elif owned_parameters(model):  # such as adapters: a checkpoint names the base that they belong to
                _ = source.base_fingerprint
        # All ranks initialize the same full tensors, of which each keeps its shard.
        with share_rng_state(self._ranks):
            initialize_missing(model, loaded, device, dtype)

    def check_model(self, model: nn.Module, *, name: str = POLICY) -> None:
        """Check files, family, names and shapes for :meth:`load_model`, without reading tensor data.

        Args:
            model: model on the meta device, not sharded.
            name: name of the source.

        Raises:
            CheckpointError: see :meth:`load_model`; truncated files are only found by :meth:`load_model`.
        """
        self.source(name).check(model)

    def check_contents(
        self, models: Models, *, contents: Contents = "model", resumable: bool = True, tokenizer: Any = None
    ) -> None:
        """Check before training that :meth:`save` would write every trained parameter, and the tokenizer.

        Args:
            models: converted models, on any device.
            contents: see :meth:`save`.
            resumable: whether checkpoints also hold the training state, so that a resume needs every trained parameter.
            tokenizer: see :meth:`save`; if it cannot write its files, a warning is logged.

        Raises:
            CheckpointError: a trained parameter would not be written.
        """
        for name, model in _by_name(models).items():
            SaveView(model, contents_of(contents, name)).check(resumable=resumable)
        if tokenizer is not None and self._ranks.rank == 0:
            check_savable_tokenizer(tokenizer)

    def check_output_dir(self, *, resume: bool) -> None:
        """Check before loading that saving would not overwrite anything.

        Raises:
            UserError: there is no output folder, it is inside a source's folder, it holds a run but ``resume`` is
                False, it is in use, or ``upload`` names no file system that is known and installed.
        """
        output_dir = self.require_output_dir()
        self._ranks.run_on_rank_0(lambda: self._bucket is not None)
        self._ranks.run_on_rank_0(self.lock.check_unused)
        for folder in self._source_folders():
            self._ranks.run_on_rank_0(partial(check_output_dir, output_dir, folder, resume=resume))

    def _source_folders(self) -> list[Path | None]:
        """Return the folders of the sources; None for a model that begins without files."""
        return [source.checkpoint_dir for source in self.sources.values()]

    def lock_output_dir(self) -> None:
        """Lock the output folder against other runs until :meth:`close`, or until the process ends.

        Without this call, each save and each search for a checkpoint locks the folder only while it runs.

        Raises:
            UserError: another run holds the lock, or the folder cannot be written to.
        """
        self.require_output_dir()
        self._ranks.run_on_rank_0(lambda: self.lock.acquire())

    def open_output_dir(self, cfg: Any, *, resume: bool) -> ResumePoint | None:
        """Check and lock the output folder, and find the resume point; call it before loading anything.

        First it checks that all ranks have the same settings: with others they would wait for each other's messages.

        Args:
            cfg: settings of this run; None does not compare them.
            resume: whether to continue the run in the folder.

        Returns:
            The checkpoint to resume from; None for a new run.

        Raises:
            CheckpointError: the settings of two ranks differ.
            UserError: see :meth:`check_output_dir`, :meth:`lock_output_dir` and :meth:`find_resume_point`.
        """
        if cfg is not None:
            check_same_settings(cfg, self._ranks)
        self.check_output_dir(resume=resume)
        self.lock_output_dir()
        # Only rank 0 uploads, but the others wait for it.
        uploads = self._ranks.gather(self.upload)
        for rank, upload in enumerate(uploads):
            if upload != uploads[0]:
                raise CheckpointError(
                    f"checkpointer.upload is {uploads[0]} on rank 0 and {upload} on rank {rank}: give all ranks the "
                    "same config."
                )
        if self.upload is not None:
            self._ranks.run_on_rank_0(partial(self._search.open_bucket, resume=resume))
        point = self.find_resume_point(cfg) if resume else None
        if self._uploader is not None and point is not None:
            # The run may have been killed before its last checkpoints were uploaded.
            self._uploader.keep = self.keep_last_n_checkpoints
            self._uploader.add_missing(self._search.in_bucket)
        return point

    def find_resume_point(self, cfg: Any = None) -> ResumePoint | None:
        """Return the newest complete and undamaged checkpoint; None, with a warning, if there is no checkpoint.

        One that only the bucket has (``upload``) is downloaded, if :meth:`open_output_dir` has opened it. The ranks
        divide the files that a resume needs, and verify their checksums. If a checkpoint is damaged, an error
        is logged and the previous checkpoint is tried.

        Args:
            cfg: settings of this run; allowed changes since the checkpoint are logged, others raise.

        Raises:
            CheckpointError: the run is finished, every checkpoint is damaged, or settings, frozen models or base
                weights have changed.
            UserError: another run has locked the folder.
        """
        with self._search.newest_undamaged() as path:
            if path is None:
                return None
            point = self._ranks.run_on_rank_0(partial(resume_point, path))
            with self._ranks.raise_on_all():
                if cfg is not None:
                    self._changed_settings = check_resumed_settings(cfg, path)
                ModelsOfRun.read(path).check_sources(self.sources, path)
            return point

    def check_resume(self, cfg: Any) -> None:
        """Check that the newest complete checkpoint can be resumed, without a lock and without verifying checksums.

        For the check of a config before its run: nothing is changed in the folder or the bucket, and without a
        checkpoint there is nothing to check. Of a checkpoint that only the bucket has, only the settings are
        downloaded.

        Raises:
            CheckpointError: see :meth:`find_resume_point`.
            RemoteError: the bucket does not exist, or cannot be read.
        """
        output_dir = self.require_output_dir()
        remote = [] if self.upload is None else self._bucket.complete()
        candidates = with_bucket(complete_directories(output_dir), remote, output_dir)
        if not candidates:
            return
        newest = candidates[0]
        if newest.is_local:
            resume_point(newest.path)  # raises for a run that is finished
            changed_settings = check_resumed_settings(cfg, newest.path)
            ModelsOfRun.read(newest.path).check_sources(self.sources, newest.path)
            # Logged last: an error makes them irrelevant.
            for sentence in changed_settings:
                log_rank_zero(get_logger(), sentence)
            return
        self._search.check_not_finished(newest.remote)
        settings = self._bucket.folder.read(f"{newest.path.name}/torchtune_config.yaml")
        if settings is not None:  # a checkpoint need not have its settings, see save
            with TemporaryDirectory() as folder:
                # With the name of the checkpoint, which messages mention.
                checkpoint = Path(folder, newest.path.name)
                checkpoint.mkdir()
                (checkpoint / "torchtune_config.yaml").write_bytes(settings)
                for sentence in check_resumed_settings(cfg, checkpoint):
                    log_rank_zero(get_logger(), sentence)

    @doing("resuming")
    def resume(self, point: ResumePoint, models: Models, state: Mapping[str, Any]) -> None:
        """Load the trained weights of ``point`` into the models, and the training state into the values of ``state``.

        Args:
            point: from :meth:`find_resume_point`.
            models: after :meth:`load_model`, the same as in :meth:`save`.
            state: the same as in :meth:`save`: objects with ``load_state_dict``, or dicts, updated in place.

        Raises:
            CheckpointError: the checkpoint has other models or belongs to another kind of run.
        """
        record = ModelsOfRun.read(point.path)
        record.check_trained(_by_name(models), point.path)
        with self._ranks.raise_on_all():
            record.check_sources(self.sources, point.path)
        self.load_trained(point.path, models)
        with self._ranks.raise_on_all():
            load_state(state, _parameters(models), point.path, self._ranks.rank)
        for sentence in self._changed_settings:
            log_rank_zero(get_logger(), sentence)

    def load_trained(self, path: Path, models: Models) -> None:
        """Load the trained weights of a checkpoint of this run into the models, without the training state.

        Args:
            path: folder of a complete checkpoint.
            models: after :meth:`load_model`, the same as in :meth:`save`.

        Raises:
            CheckpointError: the checkpoint has other models.
        """
        models = _by_name(models)
        if self.output_dir is not None:  # without one, nothing can have been saved
            self._saver.wait()  # the checkpoint may still be written in the background
        # All models are checked before any is changed.
        paths = {}
        for name, model in models.items():
            paths[name] = _weights_to_resume(model, path / _folder(name))
        for model in models.values():
            reshard(model)  # frees full parameters that a forward pass has left: the shards are loaded
        with self._ranks.raise_on_all():
            for name, model in models.items():
                device = next(model.parameters()).device
                weights = ModelWeights(model)
                if weights.owned:  # its base weights are those of load_model
                    load_adapter(weights, paths[name], device)
                else:
                    load_base(weights, open_weight_files(find_files(paths[name]), model), device)

    def save(
        self,
        name: str,
        models: Models,
        *,
        contents: Contents = "model",
        state: Mapping[str, Any] | None = None,
        cfg: Any = None,
        tokenizer: Any = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        async_save: bool = False,
        optional: bool = False,
        extra_files: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write ``output_dir/name`` atomically, then delete checkpoints according to ``keep_last_n_checkpoints``.

        Args:
            name: ``epoch_N`` or ``step_N``.
            models: the trained models: the policy, or several by name.
            contents: weights to write: ``"model"`` (all weights of a model without adapters), ``"adapter"`` (the
                adapter, in PEFT's layout), ``"merged"`` (all weights, with the adapter merged), or ``("adapter",
                "merged")`` (both, with the adapter in the subfolder ``adapter``). A mapping has the contents of each
                model, by name.
            state: training state for a resume; None for the last checkpoint of a run.
            cfg: settings of the run, saved as ``torchtune_config.yaml``.
            tokenizer: tokenizer that trained: its ``save_files(folder)`` writes vocabulary and chat template
                (:class:`~torchtune.tokenizers.SavableTokenizer`), and the tokens that end a turn are added to
                ``generation_config.json``. None copies the tokenizer files of the source.
            max_shard_bytes: maximum bytes of tensors per file.
            async_save: write in the background. The tensors are first copied to host memory. The copy is complete when
                this method returns; if ``state`` has optimizers and no weight needs a conversion, it is complete only
                at the next optimizer step, and nothing else may change the weights until then. The next save and
                :meth:`close` wait for the write and raise its errors.
            optional: on failure to write, log a warning and continue without this checkpoint.
            extra_files: contents of further files of the checkpoint, by path: a text, or the content of a JSON file.

        Returns:
            The checkpoint folder.

        Raises:
            UserError: ``name`` is not ``epoch_N`` or ``step_N``, a trained parameter would not be written, or is NaN
                or infinite, or the disk is full or not writable; earlier checkpoints are unchanged.
        """
        check_name(name)
        self._saver.wait()  # for the previous save, if it is still written in the background
        for model in _by_name(models).values():  # a validation leaves the parameters all-gathered
            reshard(model)
        # All models are checked and described before a file exists.
        views = {}
        for model_name, model in _by_name(models).items():
            unread = self.source(model_name).unread  # frozen weights that are read when they are written
            views[model_name] = SaveView(model, contents_of(contents, model_name), self._ranks, unread)
        exports = []
        files: list[TensorFile] = []
        trained = {}
        for model_name, view in views.items():
            view.check(resumable=state is not None)
            prefix = "" if len(views) == 1 else f"{model_name}."
            for parameter_name in view.trained:
                trained[f"{prefix}{parameter_name}"] = view.parameters[parameter_name]
        check_trained_finite(name, trained, self._ranks)
        for model_name, view in views.items():
            export = export_model(view, self.source(model_name), max_shard_bytes, _folder(model_name))
            exports.append(export)
            files += export.files
        # A resume checks that these have the same base weights.
        adapted = [name for name, view in views.items() if view.has_adapter and state is not None]

        def write_exports(folder: Path) -> None:
            for export in exports:
                export.write_small_files(folder, tokenizer)
            write_extra_files(folder, extra_files or {})

        # Merging and converting weights needs collectives, which must not run in the background of training: the copy
        # is then complete before this method returns, and waits for no optimizer.
        needs_collectives = any(view.merges or view.stored_weights for view in views.values())
        optimizers = []  # their next steps wait until the copy is complete
        if state is not None and not needs_collectives:
            for key, value in state.items():
                optimizers += [optimizer for _, optimizer in optimizers_of(key, value)]
        state_of_rank = None
        if state is not None:
            state_of_rank = rank_state(state, _parameters(models), self._ranks)
        return self._save(
            name,
            files,
            write_exports,
            state_of_rank,
            ModelsOfRun.of(views, self.sources, adapted),
            cfg=cfg,
            optimizers=optimizers,
            async_save=async_save,
            optional=optional,
        )

    def _save(
        self,
        name: str,
        files: list[TensorFile],
        write_exports: Callable[[Path], None],
        state: RankState | None,
        models_of_run: ModelsOfRun,
        *,
        cfg: Any,
        optimizers: Sequence[Optimizer],
        async_save: bool,
        optional: bool,
    ) -> Path:
        """Write a checkpoint of tensor files, other files, and the training state; see :meth:`save`."""

        def write_small_files(folder: Path) -> None:
            write_exports(folder)
            if cfg is not None:
                from torchtune.config import save_config

                save_config(cfg, folder / "torchtune_config.yaml")
            if state is not None:
                (folder / STATE_DIR).mkdir(exist_ok=True)  # the file of a rank may be in it already
                (folder / STATE_DIR / STRUCTURE).write_text(json.dumps(state.structure), encoding="utf-8")
                models_of_run.write(folder)

        output_dir = self.require_output_dir()
        state_file = None
        state_signature = b""
        if state is not None:
            state_file = state.file
            state_signature = state.signature
        last_save = 0
        if self._uploader is not None:  # the bucket may have newer checkpoints than the folder
            last_save = self._bucket.last_save
        job = Job(
            output_dir,
            name,
            files,
            state_file=state_file,
            state_signature=state_signature,
            write_small_files=write_small_files,
            last_save=last_save,
            finish=self._finish_save,
            optional=optional,
        )
        self._saver.save(job, in_background=async_save, optimizers=optimizers)
        return output_dir / name

    def _finish_save(self, path: Path) -> None:
        """Remove old checkpoints after a save, and begin its upload; on rank 0."""
        if self._uploader is None:
            prune(path.parent, self.keep_last_n_checkpoints)
        else:
            self._uploader.keep = self.keep_last_n_checkpoints
            self._uploader.add(path)

    def save_quantized(self, name: str, model: nn.Module, quantizer: "Quantizer") -> Path:
        """Quantize the saved checkpoint ``name`` into ``output_dir/quantized``, one tensor at a time on rank 0.

        Args:
            name: name of a checkpoint with all weights, merged if the model has adapters.
            model: the saved model.
            quantizer: determines values and layout.

        Returns:
            The folder of the quantized checkpoint.

        Raises:
            UserError: see :func:`torchtune.checkpoints.quantize_checkpoint`; the checkpoint is unchanged.
        """
        from torchtune.checkpoints._quantize import write_compressed  # loads torchao

        self._saver.wait()
        spec, description = spec_and_description(model)
        output_dir = self.require_output_dir()
        folder = output_dir / "quantized"

        def write() -> None:
            with torch.device("meta"):
                plain = build(description, spec)
            write_compressed(ModelSource(output_dir / name), plain, quantizer, folder)
            get_logger().info(f"{folder} holds {name} quantized ({quantizer.mode}).")

        self._ranks.run_on_rank_0(write)
        return folder

    def close(self) -> None:
        """Wait until the pending checkpoint is written and uploaded, and release the output folder.

        Raises:
            UserError: writing failed, or the last checkpoint of a finished run could not be uploaded; only logged if
                another error is being raised.
        """
        if self.output_dir is None:
            return
        # If the run fails, its own error matters more than that of its last checkpoint.
        is_raising = sys.exc_info()[0] is not None
        try:
            self._saver.wait()
            if self.upload is not None:
                self._finish_uploads(together=not is_raising)
        except (UserError, OSError) as error:
            if not is_raising:
                raise
            get_logger().warning(f"The last checkpoint was not written or uploaded: {error}")
        finally:
            self.lock.release()

    def _finish_uploads(self, *, together: bool) -> None:
        """Wait for the uploads.

        Args:
            together: all ranks call this method, and ranks without an uploader wait for rank 0.
        """
        # One item every 0.2 seconds, until all checkpoints are uploaded.
        waits = iter(()) if self._uploader is None else self._uploader.finish()
        if not together:
            for _ in waits:
                sign_of_life()
            return
        with doing("uploading"):
            is_finished = False
            while not is_finished:
                with self._ranks.raise_on_all():
                    is_finished = self._uploader is not None and next(waits, "finished") == "finished"
                # A collective in each turn: the other ranks wait as long, but their timeout starts anew.
                is_finished = self._ranks.any(is_finished)
                sign_of_life()

    def require_output_dir(self) -> Path:
        """Return the output folder. Raises ``CheckpointError`` if there is none."""
        if self.output_dir is None:
            raise CheckpointError("checkpointer.output_dir is missing: say where checkpoints go.")
        return self.output_dir


def _by_name(models: Models) -> dict[str, nn.Module]:
    """Return models by name; a single one is the policy."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleDict):
        return {POLICY: models}
    if not models:
        raise CheckpointError("There is no model to save or to resume: give the policy, or models by name.")
    return dict(models.items())


def _folder(name: str) -> str:
    """Return a model's subfolder of a checkpoint with a trailing slash; the policy has none."""
    return "" if name == POLICY else f"{name}/"


def _parameters(models: Models) -> dict[str, nn.Parameter]:
    """Return the parameters of all models by name; except for the policy, names start with the model's name."""
    if isinstance(models, nn.ModuleDict):  # matches the names of its optimizer
        return dict(models.named_parameters())
    parameters = {}
    for model_name, model in _by_name(models).items():
        prefix = "" if model_name == POLICY else f"{model_name}."
        for name, parameter in model.named_parameters():
            parameters[prefix + name] = parameter
    return parameters


def _weights_to_resume(model: nn.Module, folder: Path) -> Path:
    """Return the path that a resume loads: an adapter file, or the folder of the weights."""
    adapter_files = []
    for adapter_dir in (folder, folder / ADAPTER_DIR):  # the second one if merged weights are in the first
        for name in (ADAPTER_FILE, OWNED_INDEX):  # the second one if no conversion has a name in PEFT's layout
            if (adapter_dir / name).is_file():
                adapter_files.append(adapter_dir / name)
    has_adapter = bool(owned_parameters(model))
    if has_adapter and not adapter_files:
        raise CheckpointError(
            f"{folder} holds a whole model, but the model of this run has an adapter: resume with the saved "
            "torchtune_config.yaml."
        )
    if adapter_files and not has_adapter:
        raise CheckpointError(
            f"{folder} holds an adapter, but the model of this run has none: resume with the saved "
            "torchtune_config.yaml."
        )
    if has_adapter:
        return adapter_files[0]
    return folder
