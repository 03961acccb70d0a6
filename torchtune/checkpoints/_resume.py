"""Resume points: the search for one, and the comparison of a resuming run with its checkpoint: models and settings."""

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from torchtune import config
from torchtune.checkpoints._bucket import Bucket, DamagedUploadError, RemoteCheckpoint
from torchtune.checkpoints._directories import (
    MARKER,
    MODELS,
    STATE_DIR,
    complete_directories,
    damaged_files,
    marked_files,
    named_directories,
    read_marker,
)
from torchtune.checkpoints._load import ModelSource
from torchtune.checkpoints._state import damage_named, load_progress
from torchtune.checkpoints._weight_files import CheckpointError
from torchtune.training.parallel import Ranks
from torchtune.utils import FolderLock, clear_leftovers, get_logger, log_rank_zero, write_json

# Temporary folders that atomic_directory and prune leave behind in a killed process.
_LEFTOVER = re.compile(r"^\.((?:epoch|step)_\d+)\..*\.tmp$")
_ONE_MODEL = ("policy",)
REFERENCE = "reference"


@dataclass(frozen=True)
class ModelsOfRun:
    """Models of a run; nothing is recorded for a run with only a policy that trains all its weights.

    Attributes:
        trained: names of the models in checkpoints.
        frozen: ``{"folder": path, "files": fingerprint}`` of every other model, by name.
        bases: the same for the base weights of every model that is saved as an adapter, by name.
    """

    trained: tuple[str, ...] = _ONE_MODEL
    frozen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, trained: Iterable[str], sources: Mapping[str, ModelSource], adapted: Iterable[str] = ()
    ) -> "ModelsOfRun":
        """Describe the models of this run.

        Args:
            trained: names of the models that are saved.
            sources: sources of all models, by name.
            adapted: names of the models that are saved as adapters.
        """
        trained = tuple(trained)
        frozen = {}
        for name, source in sources.items():
            if name not in trained:
                frozen[name] = _record(source, source.fingerprint)
        bases = {name: _record(sources[name], sources[name].base_fingerprint) for name in adapted}
        return cls(trained, frozen, bases)

    @classmethod
    def read(cls, checkpoint: Path) -> "ModelsOfRun":
        """Read the models of the run that wrote a checkpoint. Raises ``CheckpointError`` if the record is damaged."""
        path = checkpoint / STATE_DIR / MODELS
        if not path.is_file():
            return cls()
        with damage_named(path):
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(tuple(content["trained"]), content["frozen"], content["bases"])

    def write(self, checkpoint: Path) -> None:
        """Record the models in a checkpoint."""
        if self.trained != _ONE_MODEL or self.frozen or self.bases:
            content = {"trained": list(self.trained), "frozen": self.frozen, "bases": self.bases}
            write_json(checkpoint / STATE_DIR / MODELS, content)

    def check_trained(self, names: Iterable[str], checkpoint: Path) -> None:
        """Raise ``CheckpointError`` unless the resuming run trains the same models."""
        different = set(self.trained) ^ set(names)
        if not different:
            return
        name = min(different)
        if name in self.trained:
            difference = f"the checkpoint has a trained model '{name}', this run has none"
        else:
            difference = f"this run has a trained model '{name}', the checkpoint has none"
        raise CheckpointError(f"{checkpoint}: {difference}: resume with the saved torchtune_config.yaml.")

    def check_sources(self, sources: Mapping[str, ModelSource], checkpoint: Path) -> None:
        """Check that the resuming run has the same frozen models, and the same base weights below its adapters.

        Args:
            sources: sources of all models of the resuming run, by name.
            checkpoint: path for error messages.

        Raises:
            CheckpointError: a model is missing, is new, or has other weights.
        """
        for name, base in self.bases.items():
            # A model that is missing among the sources is found by check_trained.
            if name in sources and sources[name].base_fingerprint != base["files"]:
                raise CheckpointError(
                    f"{checkpoint}: its adapter was trained on the weights in {base['folder']}, and those in "
                    f"{sources[name].checkpoint_dir} differ: set checkpointer.checkpoint_dir back, or start a new run "
                    "in another output_dir."
                )
        frozen = ModelsOfRun.of(self.trained, sources).frozen
        for name in sorted(frozen.keys() | self.frozen.keys()):
            current = frozen.get(name)
            saved = self.frozen.get(name)
            if current is None:
                difference = f"by a run with a '{name}' model ({saved['folder']}), and this run has none"
            elif saved is None:
                difference = f"by a run without a '{name}' model, and this run has one ({current['folder']})"
            elif current["files"] != saved["files"]:
                difference = (
                    f"by a run whose '{name}' model was {saved['folder']}, and the weights in {current['folder']} "
                    "differ from it"
                )
            else:
                continue
            raise CheckpointError(
                f"{checkpoint} was saved {difference}: resume with the saved torchtune_config.yaml, or start a new run "
                "in another output_dir."
            )


def _record(source: ModelSource, files: list[list[int]]) -> dict[str, Any]:
    """Return the record of a model's weights: the folder is for messages, the fingerprint is compared."""
    return {"folder": str(source.checkpoint_dir), "files": files}


def add_reference(checkpointer: Any, ref_checkpointer: Any, loss: Any) -> None:
    """Add a loss's reference model to the models of the run, so that a resume checks its weights.

    Without a checkpointer, the reference is the initial model: the policy's source.

    Args:
        checkpointer: checkpointer of the run.
        ref_checkpointer: component of the reference's checkpointer, or None.
        loss: component of the loss; its ``needs_reference`` decides whether a reference is added by default.

    Raises:
        UserError: a component cannot be instantiated.

    Example:
        >>> from torchtune.checkpoints import FullModelHFCheckpointer, add_reference
        >>> checkpointer = FullModelHFCheckpointer(str(checkpoint))
        >>> add_reference(checkpointer, None, {"_component_": "torchtune.rlhf.loss.DPOLoss"})
        >>> list(checkpointer.sources)
        ['policy', 'reference']
    """
    if ref_checkpointer is not None:
        checkpointer.add_source(REFERENCE, config.instantiate(ref_checkpointer))
    elif getattr(config.instantiate(loss), "needs_reference", False):
        checkpointer.add_source(REFERENCE, checkpointer)


class OnResume(Enum):
    """Treatment of a setting that differs from the checkpoint's."""

    NEW = "the new value takes effect"
    KEPT = "the checkpoint's value goes on"
    FIXED = "refused: the saved state depends on the old value"
    SILENT = "not compared"


# Every setting of the training recipes; a dotted name has precedence over the setting that contains it. Settings that
# the data loader itself checks, such as the content of a dataset or the product of the batch sizes, may change here.
_SETTINGS = {
    OnResume.SILENT: "recipe resume_from_checkpoint",
    OnResume.KEPT: "seed",
    # The states of optimizer and schedule contain the old values, including the learning rate; the weights and the
    # adapter's scale fit only this model; the position in the data fits only this order.
    OnResume.FIXED: "optimizer optimizer_precision optimizer_in_bwd lr_scheduler policy_model reward_and_value_model "
    "model model_converters quantizer resize_token_embeddings dtype shuffle max_steps_per_epoch num_steps",
    OnResume.NEW: "model.checkpoint_dir "
    "tokenizer dataset dataset_val collate_fn batch_size batch_size_val "
    "gradient_accumulation_steps epochs max_steps loss clip_grad_norm run_val_every_n_steps "
    "ref_checkpointer ref_model reference_cache teacher_model teacher_checkpointer "
    "kd_loss kd_ratio teacher_cache image_cache "
    "policy_model.checkpoint_dir reward_and_value_model.checkpoint_dir "
    "value_checkpointer reward_checkpointer ref_policy_checkpointer forward_batch_size top_k "
    "max_generated_tokens temperature stop_token_ids min_response_length penalise_no_eos "
    "reward_penalty kl_coeff whiten_rewards gamma lmbda ppo_epochs ppo_batch_size "
    "num_samples sampler rewards environment max_turns tool_timeout tool_format advantages num_iterations "
    "tokens_per_batch drop_unfinished "
    "output_dir checkpointer save_every_n_steps save_every_n_minutes enable_async_checkpointing "
    "save_adapter_weights_only max_skipped_steps loss_spike_threshold hang_timeout_minutes "
    "device compile cudnn_deterministic_mode share_prefix "
    "enable_activation_checkpointing ac_mode ac_option enable_activation_offloading "
    "enable_fp8_training fp8_recipe_name fake_quant_after_n_steps show_samples_every_n_steps "
    "data_parallel_replicate_dim data_parallel_shard_dim tensor_parallel_dim tensor_parallel_plan "
    "context_parallel_dim expert_parallel_dim fsdp_cpu_offload fsdp_reshard_after_forward "
    "custom_sharded_layers keep_best early_stopping_patience scores scores_rows scores_max_new_tokens "
    "metric_logger log_every_n_steps log_peak_memory_stats log_level profiler",
}
ON_RESUME = {}  # name of a setting -> treatment
for _treatment, _names in _SETTINGS.items():
    ON_RESUME |= dict.fromkeys(_names.split(), _treatment)
# Settings of which each machine may have its own.
_MAY_DIFFER = {"log_level", "metric_logger", "profiler"}
_NOT_SET = "not set"
# Allowed changes of fixed settings, which lose nothing, and their effects.
_EXACT = {
    ("dtype", "bf16", "fp32"): "weights and optimizer states keep their values, and updates are no longer rounded"
}


def check_resumed_settings(cfg: Any, checkpoint: Path) -> list[str]:
    """Compare the settings of a run with the settings in a checkpoint.

    Args:
        cfg: settings of a recipe.
        checkpoint: checkpoint folder with ``torchtune_config.yaml``; if the file is missing, a warning is logged.

    Returns:
        Sentences about the changes, to be logged once the run is resumed: the saved state may not fit them.

    Raises:
        CheckpointError: a setting that the saved state depends on has changed.
    """
    from torchtune.config import to_yaml

    path = checkpoint / "torchtune_config.yaml"
    if not path.is_file():
        log_rank_zero(
            get_logger(),
            f"{path} is missing, so nobody can tell which settings changed: what the checkpoint's states of optimizer "
            "and schedule hold, such as the learning rate, goes on, whatever optimizer and lr_scheduler say now.",
            level=logging.WARNING,
        )
        return []
    with damage_named(path):
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path} holds no settings: resume from another checkpoint.")
    # Compare the serialized settings, in which secrets are redacted on both sides.
    current = yaml.safe_load(to_yaml(cfg))
    changes: dict[OnResume, list[str]] = defaultdict(list)
    for name in sorted(saved.keys() & current.keys()):  # a newer release may have other settings
        for key, old, new in _differences(name, saved[name], current[name]):
            treatment = _treatment(key)
            effect = ""
            are_texts = isinstance(old, str) and isinstance(new, str)  # other values may not be hashable
            if are_texts and (key, old, new) in _EXACT:
                treatment = OnResume.NEW
                effect = f" ({_EXACT[key, old, new]})"
            if treatment is OnResume.KEPT and new is None:
                continue  # left out, as by seed: null: the checkpoint's value goes on, which nobody changed
            changes[treatment].append(f"{key} was {old} and is {new} now{effect}")
    fixed = changes[OnResume.FIXED]
    if fixed:
        pronoun = "it" if len(fixed) == 1 else "them"
        raise CheckpointError(
            f"{path}: the run cannot go on with other settings than it has: {'; '.join(fixed)}: set {pronoun} back, or "
            "start a new run from its weights in another output_dir."
        )
    sentences = []
    for treatment in (OnResume.NEW, OnResume.KEPT):
        if changes[treatment]:
            sentences.append(f"Resumed with other settings, {treatment.value}: {'; '.join(changes[treatment])}.")
    return sentences


def check_same_settings(cfg: Any, ranks: Ranks) -> None:
    """Check that all ranks have the settings of rank 0; each machine reads its own command line and config.

    Absolute paths and settings of loggers may differ between machines. A collective.

    Args:
        cfg: settings of a recipe on this rank.
        ranks: all ranks.

    Raises:
        CheckpointError: a setting differs; raised on all ranks.
    """
    from torchtune.config import to_yaml

    if ranks.size == 1:
        return
    # The serialized settings again: secrets are redacted, and variables of the environment are not resolved.
    text = to_yaml(cfg)
    text_of_first = ranks.broadcast(text)
    changes = []
    if text != text_of_first:
        for key, value_of_first, value in _differences("", yaml.safe_load(text_of_first), yaml.safe_load(text)):
            key = key.removeprefix(".")  # the settings as a whole have the name ""
            are_paths = _is_absolute(value_of_first) and _is_absolute(value)
            if are_paths or key.partition(".")[0] in _MAY_DIFFER:
                continue
            changes.append(f"{key} is {value_of_first} on rank 0 and {value} on rank {ranks.rank}")
    with ranks.raise_on_all():
        if changes:
            raise CheckpointError(
                f"The machines run with other settings: {'; '.join(changes)}: give all machines the same config and "
                "the same command line."
            )


def _is_absolute(value: Any) -> bool:
    """Return whether a setting is an absolute path."""
    return isinstance(value, str) and Path(value).is_absolute()


def _differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, old, new) for every value that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(f"{name}.{key}", old.get(key, _NOT_SET), new.get(key, _NOT_SET))
    elif isinstance(old, list) and isinstance(new, list):
        for index, (old_item, new_item) in enumerate(zip_longest(old, new, fillvalue=_NOT_SET)):
            yield from _differences(f"{name}.{index}", old_item, new_item)
    elif old != new:
        yield name, old, new


def _treatment(name: str) -> OnResume:
    """Return the treatment of a dotted name; a custom recipe's own settings take effect as the recipe reads them."""
    while name not in ON_RESUME and "." in name:
        name = name.rpartition(".")[0]
    return ON_RESUME.get(name, OnResume.NEW)


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint to resume from.

    Attributes:
        path: folder of the checkpoint.

    Example:
        >>> torchtune.checkpoints.ResumePoint(folder / "epoch_0").path.name
        'epoch_0'
    """

    path: Path

    @cached_property
    def progress(self) -> dict[str, Any]:
        """The values under ``progress`` in the state, such as seed and global step."""
        return load_progress(self.path)


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint that a run may resume from.

    Attributes:
        path: its folder, to be downloaded unless ``is_local``.
        saves: number of the save in its run.
        is_local: whether the folder exists.
        remote: the same checkpoint in the bucket, if it is there.
    """

    path: Path
    saves: int
    is_local: bool
    remote: RemoteCheckpoint | None


def with_bucket(local: list[Path], remote: list[RemoteCheckpoint], output_dir: Path) -> list[Candidate]:
    """Return the local and uploaded checkpoints, newest first; of equal saves, local ones first.

    Two different checkpoints of one name are of two runs that went on from the same point: the newer one counts.

    Args:
        local: complete checkpoints in ``output_dir``.
        remote: complete checkpoints in the bucket.
        output_dir: folder of the run.
    """
    candidates = {}
    for path in local:
        candidates[path.name] = Candidate(path, read_marker(path)["saves"], is_local=True, remote=None)
    for checkpoint in remote:
        path = output_dir / checkpoint.name
        here = candidates.get(checkpoint.name)
        if here is None or here.saves < checkpoint.saves:
            candidates[path.name] = Candidate(path, checkpoint.saves, is_local=False, remote=checkpoint)
        elif (path / MARKER).read_bytes() == checkpoint.marker:
            candidates[path.name] = replace(here, remote=checkpoint)
    return sorted(
        candidates.values(),
        key=lambda candidate: (candidate.saves, candidate.is_local, candidate.path.name),
        reverse=True,
    )


def resume_candidates(output_dir: Path, *, is_only_place: bool) -> list[Path]:
    """Return the complete checkpoints, newest first; empty if the run starts from the beginning.

    Leftovers of an interrupted save are deleted; a checkpoint that it had moved aside, to replace it, is restored.

    Args:
        output_dir: folder of the run.
        is_only_place: there are no checkpoints in a bucket, so that this folder must not be without one.

    Raises:
        CheckpointError: there are only incomplete or damaged checkpoints.
    """
    if output_dir.is_dir():
        for name in os.listdir(output_dir):
            leftover = _LEFTOVER.match(name)
            if leftover is not None:
                clear_leftovers(output_dir / leftover[1])
    complete = complete_directories(output_dir)
    incomplete = sorted(path for path in named_directories(output_dir) if path not in complete)
    for path in incomplete:
        if not (path / MARKER).exists():
            continue
        if not complete and is_only_place:
            read_marker(path)  # raises an error that names the damage
        get_logger().error(f"output_dir: {path / MARKER} is damaged: {path.name} does not count as a checkpoint.")
    if complete or not is_only_place:
        return complete[::-1]
    if incomplete:
        names = [path.name for path in incomplete]
        raise CheckpointError(
            f"output_dir: {output_dir} holds {', '.join(names[:3])} without the marker of a complete "
            "checkpoint, so there is nothing to resume: choose another output_dir (and, to start from these "
            "weights, give that folder as checkpoint_dir)."
        )
    get_logger().warning(f"{output_dir} holds no complete checkpoint: the run starts from the beginning.")
    return []


def resume_point(path: Path) -> ResumePoint:
    """Return the resume point of an undamaged checkpoint. Raises ``CheckpointError`` if its run is finished."""
    if not read_marker(path)["resumable"]:
        raise CheckpointError(
            f"output_dir: the run in {path.parent} is finished ({path.name}), there is nothing to resume: start "
            f"a new run from that folder, in another output_dir."
        )
    return ResumePoint(path)


def log_damage_or_raise(path: Path, faults: list[str], older: list[Path], setting: str) -> None:
    """Log the damage of a checkpoint, and the older checkpoint to try instead.

    Args:
        path: the damaged checkpoint.
        faults: phrases for its missing or changed files.
        older: older checkpoints, newest first.
        setting: the setting with the place of the checkpoint.

    Raises:
        CheckpointError: there is no older checkpoint.
    """
    omitted = f", and {len(faults) - 1} more files are damaged" if len(faults) > 1 else ""
    damage = f"{setting}: {faults[0]}{omitted}, although {path.name} was saved whole"
    if not older:
        raise CheckpointError(
            f"{damage}, and there is no checkpoint before it to go on from: bring the file back, or delete the folder "
            f"{path.name}, and the run begins anew."
        )
    get_logger().error(
        f"{damage}: the run goes on from the checkpoint before, {older[0].name}, if that is whole, and repeats what "
        "was trained since."
    )


class CheckpointSearch:
    """Search for the checkpoint that a run resumes from, in its output folder and its bucket. All ranks call it.

    Args:
        output_dir: folder of the run.
        lock: lock of the folder, which rank 0 holds during a search.
        ranks: all ranks.
        bucket: bucket of the run, which only rank 0 uses; None without one.

    Attributes:
        in_bucket: complete checkpoints in the bucket, on rank 0 after :meth:`open_bucket`.
    """

    def __init__(self, output_dir: Path, lock: FolderLock, ranks: Ranks, bucket: Bucket | None) -> None:
        self._output_dir = output_dir
        self._lock = lock
        self._ranks = ranks
        self._bucket = bucket
        self.in_bucket: list[RemoteCheckpoint] = []

    def open_bucket(self, *, resume: bool) -> None:
        """Check that the bucket can be written to, and that nothing is overwritten; on rank 0."""
        self.in_bucket = self._bucket.complete()
        if self.in_bucket and not resume:
            raise CheckpointError(
                f"checkpointer.upload: {self._bucket} already holds a run ({self.in_bucket[-1].name}): "
                "set resume_from_checkpoint=True to go on with it, or choose another folder."
            )
        self._bucket.claim()  # after the check, so that a start by mistake does not stop a run

    @contextmanager
    def newest_undamaged(self) -> Iterator[Path | None]:
        """Context manager with the newest complete and undamaged checkpoint, downloaded if only the bucket has it.

        The output folder stays locked in the block. It is None if the run starts from the beginning.

        Raises:
            CheckpointError: every checkpoint is damaged, or the run in the bucket is finished.
            UserError: another run has locked the folder.
        """
        with ExitStack() as stack:

            def begin() -> list[Candidate]:
                if self._output_dir.is_dir():  # the lock would create it
                    stack.enter_context(self._lock.held())
                local = resume_candidates(self._output_dir, is_only_place=not self.in_bucket)
                return with_bucket(local, self.in_bucket, self._output_dir)

            # Rank 0 alone lists the folder, so that all ranks try the same checkpoints in the same order.
            candidates = self._ranks.run_on_rank_0(begin)
            for number, candidate in enumerate(candidates):
                faults = self._find_faults(candidate)
                if not faults:
                    yield candidate.path
                    return
                older = [older_candidate.path for older_candidate in candidates[number + 1 :]]
                setting = "output_dir" if candidate.is_local else "checkpointer.upload"
                self._ranks.run_on_rank_0(partial(log_damage_or_raise, candidate.path, faults, older, setting))
            yield None

    def _find_faults(self, candidate: Candidate) -> list[str]:
        """Return a phrase for each fault of a checkpoint; one that is missing or damaged here is downloaded."""
        path = candidate.path
        if not candidate.is_local:
            faults = self._ranks.run_on_rank_0(partial(self._download_faults, candidate))
            if faults:
                return faults
            self._check_same_marker(path)
            return self._find_damage(path)
        faults = self._find_damage(path)
        if faults and candidate.remote is not None:
            text = f"output_dir: {faults[0]}: {path.name} is downloaded again from {self._bucket}."
            self._ranks.run_on_rank_0(partial(get_logger().error, text))
            faults = self._ranks.run_on_rank_0(partial(self._download_faults, candidate))
        return faults

    def _download_faults(self, candidate: Candidate) -> list[str]:
        """Download a checkpoint of the bucket, with the best one so far; return a phrase for its damage; on rank 0.

        The list is empty if the checkpoint is whole.
        """
        remote = candidate.remote
        self.check_not_finished(remote)
        try:
            self._bucket.download(remote, candidate.path.parent)
        except DamagedUploadError as error:
            return [str(error)]
        by_name = {checkpoint.name: checkpoint for checkpoint in self.in_bucket}
        self._bucket.download_best(by_name, candidate.path.parent)
        return []

    def _check_same_marker(self, path: Path) -> None:
        """Raise ``CheckpointError`` unless all ranks see the checkpoint that rank 0 has downloaded."""
        marker = None
        with self._ranks.raise_on_all():
            if (path / MARKER).is_file():
                marker = (path / MARKER).read_bytes()
        markers = self._ranks.gather(marker)
        for rank, marker_of_rank in enumerate(markers):
            if marker_of_rank != markers[0]:
                seen = "another" if marker_of_rank else "none"
                raise CheckpointError(
                    f"The ranks disagree about the newest checkpoint of {self._bucket}: rank 0 has downloaded "
                    f"{path.name} into {path.parent}, and rank {rank} sees {seen} there: give all machines the same "
                    "output_dir."
                )

    def _find_damage(self, path: Path) -> list[str]:
        """Return a phrase for each missing or changed file that a resume needs; each rank verifies some of them."""
        faults: list[str] = []
        with self._ranks.raise_on_all():
            files = marked_files(path, everything=False)
            own_files = files[self._ranks.rank :: self._ranks.size]
            faults = damaged_files(path, own_files)
        all_faults = []
        for faults_of_rank in self._ranks.gather(faults):
            all_faults += faults_of_rank
        return all_faults

    def check_not_finished(self, remote: RemoteCheckpoint) -> None:
        """Raise ``CheckpointError`` if a checkpoint of the bucket has no training state."""
        if not remote.resumable:
            raise CheckpointError(
                f"checkpointer.upload: the run in {self._bucket} is finished ({remote.name}), there is nothing to "
                "resume: start a new run from those weights, in another folder."
            )
