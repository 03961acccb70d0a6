"""Checkpoints of recipes copied from earlier releases: the client, full state dicts, and names of files.

``CheckpointClient`` wraps a checkpointer. Synchronous checkpoints use the checkpointer's ``load_checkpoint`` and
``save_checkpoint`` with full state dicts, in the layout of earlier releases (``recipe_state.pt``). Asynchronous
checkpoints use its ``save`` and ``resume``, and are sharded: checkpointers load and save sharded models and never hold
a full model. The functions for full state dicts convert between the two, one tensor at a time.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from torchtune import config
from torchtune.checkpoints import (
    ADAPTER_CONFIG,
    ADAPTER_KEY,
    DATALOADER_KEY,
    EPOCHS_KEY,
    MAX_STEPS_KEY,
    MODEL_KEY,
    OPT_KEY,
    SEED_KEY,
    STEPS_KEY,
    TOTAL_EPOCHS_KEY,
    VAL_DATALOADER_KEY,
    CheckpointError,
    FormattedCheckpointFiles,
    ModelWeights,
    complete_directories,
    get_largest_iter_folder,
)
from torchtune.compat._former_training import OptimizerInBackwardWrapper
from torchtune.modules.conversion import get_conversions
from torchtune.modules.peft import LoRA, get_adapter_params, get_merged_lora_ckpt
from torchtune.training.parallel import Ranks, full_tensor, read_shard, reshard
from torchtune.utils import get_device, get_logger, get_world_size_and_rank

_TOTAL_STEPS_KEY = "total_training_steps"
# Keys of the training state of asynchronous checkpoints.
_OPTIMIZER = "optimizer"
_PROGRESS = "progress"
# Replaces a file in error messages.
_DICT = Path("state dict")

ADAPTER_CONFIG_FNAME = "adapter_config"
ADAPTER_MODEL_FNAME = "adapter_model"
SAFETENSOR_INDEX_FNAME = "model.safetensors.index.json"
TORCH_INDEX_FNAME = "pytorch_model.bin.index.json"
SHARD_FNAME = "model-{cpt_idx}-of-{num_shards}"
RECIPE_STATE_DIRNAME = "recipe_state"
REPO_ID_FNAME = "original_repo_id"
SUFFIXES_TO_NOT_COPY = [
    ".pt",
    ".pth",
    ".bin",
    ".safetensors",
    SAFETENSOR_INDEX_FNAME,
    TORCH_INDEX_FNAME,
    ADAPTER_CONFIG_FNAME,
    ADAPTER_MODEL_FNAME,
]
_RECIPE_STATE_FILE = "recipe_state.pt"


@dataclass
class TrainingProgress:
    """Progress of a run.

    Attributes:
        seed: seed of the run.
        epochs_run: number of complete epochs.
        total_epochs: number of epochs of the run.
        max_steps_per_epoch: maximum optimizer steps per epoch; None for all data.
        steps_run: completed optimizer steps; None if the recipe does not count them.
        total_training_steps: optimizer steps of the run.
        dataloader_state_dict: position in the training data.
        val_dataloader_state_dict: position in the validation data.
    """

    seed: int
    epochs_run: int
    total_epochs: int
    max_steps_per_epoch: int | None
    steps_run: int | None = None
    total_training_steps: int | None = None
    dataloader_state_dict: dict[str, Any] | None = None
    val_dataloader_state_dict: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, object]:
        """Return the values under the keys of checkpoints."""
        return {
            SEED_KEY: self.seed,
            EPOCHS_KEY: self.epochs_run,
            TOTAL_EPOCHS_KEY: self.total_epochs,
            MAX_STEPS_KEY: self.max_steps_per_epoch,
            STEPS_KEY: self.steps_run,
            _TOTAL_STEPS_KEY: self.total_training_steps,
            DATALOADER_KEY: self.dataloader_state_dict,
            VAL_DATALOADER_KEY: self.val_dataloader_state_dict,
        }


class CheckpointClient:
    """Loads, saves and resumes checkpoints according to a config. All ranks call every method.

    Args:
        cfg: config with ``checkpointer``, ``device``, and, False by default, ``resume_from_checkpoint``,
            ``enable_async_checkpointing`` and ``optimizer_in_bwd``.
        checkpointer: replaces ``cfg.checkpointer``.
    """

    def __init__(self, cfg: Any, checkpointer: Any | None = None) -> None:
        self._resume = bool(cfg.get("resume_from_checkpoint", False))
        self._enable_async = bool(cfg.get("enable_async_checkpointing", False))
        self._optimizer_in_bwd = bool(cfg.get("optimizer_in_bwd", False))
        self._device = get_device(cfg.get("device"))
        if checkpointer is None:
            # load_distributed_checkpoint restores an asynchronous checkpoint, after the base weights.
            from_state = self._resume and not self._enable_async
            checkpointer = config.instantiate(cfg.checkpointer, should_load_recipe_state=from_state)
        self._checkpointer = checkpointer

    def load_base_checkpoint(self) -> dict[str, Any]:
        """Load the initial weights or, when resuming a synchronous checkpoint, its weights and state.

        Returns:
            ``{"model": {parameter name: tensor}}``; when resuming also ``"adapter"`` (LoRA), ``"optimizer"`` and the
            values of :class:`TrainingProgress`.

        Raises:
            CheckpointError: files are missing or corrupt, or there is no checkpoint to resume from.
        """
        return self._checkpointer.load_checkpoint()

    def save_checkpoint(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerInBackwardWrapper,
        training_progress: TrainingProgress,
        epoch: int,
        adapter_config: dict[str, Any] | None = None,
        adapter_only: bool = False,
        single_device: bool = False,
        *,
        full_tensors: bool = True,
        dir_prefix: str = "epoch",
    ) -> None:
        """Write ``epoch_N`` or ``step_N``, with the training state unless training is over.

        Args:
            model: sharded or not; its adapters are saved separately and merged into the saved weights.
            optimizer: its full state is saved.
            training_progress: progress for a resume.
            epoch: N, counted from 0; the last epoch of the run needs no training state.
            adapter_config: LoRA settings ``r``, ``lora_alpha``, ``target_modules``, ``peft_type``.
            adapter_only: only save the adapter.
            single_device: the recipe loads the optimizer with ``optimizer.load_state_dict``.
            full_tensors: accepted and ignored; checkpoints load on any number of ranks.
            dir_prefix: ``"step"`` names the folder after ``training_progress.steps_run``.

        Raises:
            CheckpointError: ``adapter_only`` without an adapter.
            UserError: the disk is full; earlier checkpoints are unchanged.
        """
        has_adapter = bool(get_adapter_params(model))
        if adapter_only and not has_adapter:
            raise CheckpointError("save_adapter_weights_only: the model has no adapter: set it to False.")
        if dir_prefix == "step":
            number = training_progress.steps_run
            total_steps = training_progress.total_training_steps or float("inf")  # not known: no step is the last
            intermediate = (number or 0) < total_steps
        else:
            number = epoch
            intermediate = epoch + 1 < training_progress.total_epochs

        # The last checkpoint is not resumed, and has the layout of earlier releases in both modes.
        if self._enable_async and intermediate:
            contents: str | tuple[str, ...] = "model"
            if has_adapter:
                contents = "adapter" if adapter_only else ("adapter", "merged")
            self._checkpointer.save(
                f"{dir_prefix}_{number}",
                model,
                state={_OPTIMIZER: optimizer, _PROGRESS: training_progress.state_dict()},
                contents=contents,
                async_save=True,
            )
            return

        # All ranks gather the full tensors; rank 0 has them, and writes.
        checkpoint = self._full_checkpoint(model, adapter_config, adapter_only)
        if intermediate:
            checkpoint[OPT_KEY] = self._full_optimizer(model, optimizer, single_device)
            checkpoint.update(training_progress.state_dict())
        if self._enable_async:
            self._checkpointer.close()  # waits for checkpoints that are still being written
        self._ranks.run_on_rank_0(
            partial(
                self._checkpointer.save_checkpoint,
                checkpoint,
                epoch=epoch,
                intermediate_checkpoint=intermediate,
                adapter_only=adapter_only,
                step=training_progress.steps_run,
                dir_prefix=dir_prefix,
            )
        )

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks(CheckpointError)

    def _full_checkpoint(
        self, model: nn.Module, adapter_config: dict[str, Any] | None, adapter_only: bool
    ) -> dict[str, Any]:
        """Return model and adapter as full state dicts, on rank 0."""
        for conversion in get_conversions(model):
            if isinstance(conversion, LoRA) and not conversion.is_uniform:
                raise CheckpointError(
                    "model_converters: these checkpoints hold adapters of one rank and nothing beside them: leave out "
                    "train_modules, rank_pattern and alpha_pattern, or call save(…) of the checkpointer."
                )
        _, rank = get_world_size_and_rank()
        is_rank_zero = rank == 0
        adapter_params = get_adapter_params(model)
        # A collective: the other ranks take part in it and receive nothing.
        tensors = gather_cpu_state_dict(model, is_rank_zero, self._device, adapter_weights_only=adapter_only)
        checkpoint: dict[str, Any] = {}
        if adapter_params:
            # Empty on the other ranks, as their tensors are.
            checkpoint[ADAPTER_KEY] = {name: tensors[name] for name in adapter_params if name in tensors}
            if adapter_config is not None:
                checkpoint[ADAPTER_CONFIG] = dict(adapter_config)
        if adapter_only:
            return checkpoint
        if adapter_params and is_rank_zero:
            # As in earlier releases, the weights of the model have the adapter merged in.
            if adapter_config:
                rank_of_adapter = adapter_config["r"]
                alpha = adapter_config["lora_alpha"]
            else:  # all adapters of the model have the same
                adapted_layer = next(module for module in model.modules() if hasattr(module, "adapter_params"))
                rank_of_adapter = adapted_layer.rank
                alpha = adapted_layer.alpha
            tensors = get_merged_lora_ckpt(dict(tensors), rank=rank_of_adapter, alpha=alpha)
        checkpoint[MODEL_KEY] = tensors
        return checkpoint

    def _full_optimizer(self, model: nn.Module, optimizer: Any, single_device: bool) -> dict[str, Any]:
        """Return the full state of the optimizer, on rank 0."""
        if single_device:
            return optimizer.state_dict()
        _, rank = get_world_size_and_rank()
        is_rank_zero = rank == 0
        if not self._optimizer_in_bwd:
            return get_full_optimizer_state_dict(model, optimizer, is_rank_zero, self._device)
        states = {}
        for name, single_optimizer in optimizer.optim_map.items():
            states[name] = get_full_optimizer_state_dict(model, single_optimizer, is_rank_zero, self._device)
        return states

    def load_distributed_checkpoint(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerInBackwardWrapper,
        adapter_config: dict[str, Any] | None = None,
        dataloader: Any | None = None,
        single_device: bool = False,
    ) -> dict[str, Any]:
        """Restore the newest asynchronous checkpoint into model and optimizer; every rank reads its own shard.

        Args:
            model: model with its base weights loaded.
            optimizer: optimizer of the trained parameters.
            adapter_config: accepted and ignored; the model determines its adapter's parameters.
            dataloader: its position is restored if it has ``load_state_dict``.
            single_device: accepted and ignored; the checkpoint fits any number of ranks.

        Returns:
            The values of :class:`TrainingProgress`, and the optimizer's state under ``"optimizer"``.

        Raises:
            CheckpointError: there is no checkpoint, or it belongs to another model or kind of run.
        """
        directories = complete_directories(self._checkpointer.output_dir)
        if directories:
            newest = directories[-1]
            if (newest / _RECIPE_STATE_FILE).is_file():
                raise CheckpointError(
                    f"{newest} was saved as a full state dict: resume it with enable_async_checkpointing=False."
                )
        point = self._checkpointer.find_resume_point()
        if point is None:
            raise CheckpointError(
                f"resume_from_checkpoint: {self._checkpointer.output_dir} holds no checkpoint: set it to False, or "
                "give the output_dir of the run."
            )
        progress: dict[str, Any] = {}  # filled by resume
        self._checkpointer.resume(point, model, {_OPTIMIZER: optimizer, _PROGRESS: progress})
        if dataloader is not None and progress.get(DATALOADER_KEY) and hasattr(dataloader, "load_state_dict"):
            dataloader.load_state_dict(progress[DATALOADER_KEY])
        return {**progress, OPT_KEY: optimizer.state_dict()}


@torch.no_grad()
def load_from_full_model_state_dict(
    model: nn.Module,
    full_sd: dict[str, Any],
    device: torch.device,
    strict: bool = False,
    cpu_offload: bool = False,
    use_distributed_state_dict: bool = False,
    release_sd: bool = True,
) -> _IncompatibleKeys:
    """Copy a full state dict into a model, sharded or not; every rank copies its own shard.

    Parameters on the meta device are materialized; the model's dtype does not change.

    Args:
        model: model on the meta device or materialized.
        full_sd: full tensors by this library's parameter names; may cover a part of the model.
        device: device of materialized parameters.
        strict: raise if names in ``full_sd`` are missing or unexpected.
        cpu_offload: place parameters in host memory instead of ``device``.
        use_distributed_state_dict: accepted and ignored.
        release_sd: replace each tensor in ``full_sd`` by None after copying it, to free host memory.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict``.

    Raises:
        RuntimeError: ``strict`` is set and the names differ.
        CheckpointError: a tensor has another shape than its parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    missing = [name for name in names if name not in full_sd]
    unexpected = sorted(full_sd.keys() - set(names))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"The state dict does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}."
        )
    reshard(model)  # frees full parameters that a forward pass has left: the shards are loaded
    target = torch.device("cpu") if cpu_offload else torch.device(device)
    weights = ModelWeights(model)
    for name in names:
        if name in full_sd:
            weights.load_value(name, full_sd[name], _DICT, target)
            if release_sd:
                full_sd[name] = None
    return _IncompatibleKeys(missing, unexpected)


@torch.no_grad()
def gather_cpu_state_dict(
    model: nn.Module, is_rank_zero: bool, device: torch.device | None = None, adapter_weights_only: bool = False
) -> dict[str, Any]:
    """Gather the full state dict of a sharded model in rank 0's host memory. All ranks call it.

    Args:
        model: sharded or not.
        is_rank_zero: whether this rank receives the tensors.
        device: device on which shards in host memory are gathered; required if the process group has no CPU backend.
        adapter_weights_only: only gather the adapter's parameters.

    Returns:
        Full tensors on the CPU by parameter name; empty on all ranks but 0.
    """
    reshard(model)
    tensors = model.state_dict()
    names = list(tensors)
    if adapter_weights_only:
        adapter_params = get_adapter_params(model)
        names = [name for name in names if name in adapter_params]
    gathered = {}
    for name in names:
        # A collective: all ranks call it, in the order of the state dict.
        gathered_tensor = _gather(tensors[name], device)
        if is_rank_zero:
            gathered[name] = gathered_tensor.cpu()
    return gathered


def _gather(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the full tensor; a shard in host memory is gathered on ``device``."""
    if isinstance(tensor, DTensor) and device is not None:
        is_elsewhere = tensor.device.type != torch.device(device).type
        if is_elsewhere:  # the process group may have no backend for host memory
            tensor = tensor.to(device)
    return full_tensor(tensor)


@torch.no_grad()
def get_full_optimizer_state_dict(
    model: nn.Module, opt: Optimizer, is_rank_zero: bool, device: torch.device | None = None
) -> dict[str, Any]:
    """Gather the full state of an optimizer in rank 0's host memory. All ranks call it.

    Args:
        model: model with the parameters of ``opt``.
        opt: optimizer of all or some parameters of ``model``.
        is_rank_zero: whether this rank receives the state.
        device: see :func:`gather_cpu_state_dict`.

    Returns:
        ``{"state": {parameter name: {key: value}}, "param_groups": [{"params": [parameter name, ...], ...}]}``; empty
        on all ranks but 0.

    Raises:
        ValueError: ``opt`` has a parameter that ``model`` lacks.
    """
    names = _parameter_names(model, opt)
    states: dict[str, dict[str, Any]] = {}
    for parameter, parameter_state in opt.state.items():
        gathered = {}
        for key, value in parameter_state.items():
            if isinstance(value, torch.Tensor):
                value = _gather(value, device).to("cpu", copy=True)
            gathered[key] = value
        states[names[parameter]] = gathered
    if not is_rank_zero:
        return {}
    return {"state": states, "param_groups": _named_groups(opt, names)}


def load_from_full_optimizer_state_dict(
    model: nn.Module, opt: Optimizer, full_sd: Mapping[str, Any], device: torch.device
) -> None:
    """Load the result of :func:`get_full_optimizer_state_dict`; every rank stores its shard. All ranks call it.

    Args:
        model: model with the parameters of ``opt``.
        opt: optimizer of parameters of ``model``.
        full_sd: full tensors by parameter name.
        device: accepted and ignored; the state is placed with the parameters.

    Raises:
        CheckpointError: the state belongs to other parameters.
        ValueError: ``opt`` has a parameter that ``model`` lacks.
    """
    groups = _named_groups(opt, _parameter_names(model, opt))
    names = _names_in(groups)
    saved_names = _names_in(full_sd["param_groups"])
    if sorted(names) != sorted(saved_names):
        unmatched = min(set(names) ^ set(saved_names), default="?")  # "?" for a name that one side has twice
        raise CheckpointError(
            f"The optimizer state in the checkpoint belongs to other parameters ('{unmatched}' is on one side only): "
            "resume with the config that the checkpoint was trained with."
        )

    # torch's own load_state_dict takes parameters by number.
    numbers = {name: number for number, name in enumerate(names)}
    state = {}
    for name, values in full_sd["state"].items():
        parameter = model.get_parameter(name)
        state[numbers[name]] = {key: _shard(value, parameter) for key, value in values.items()}
    # Parameters may be grouped in another way: a group gets the settings with which its first parameter was saved.
    saved_groups = {}
    for saved_group in full_sd["param_groups"]:
        for name in saved_group["params"]:
            saved_groups[name] = saved_group
    for group in groups:
        group_names = group["params"]
        if group_names:
            group.update(saved_groups[group_names[0]])  # with the saved group's params, which the next line replaces
        group["params"] = [numbers[name] for name in group_names]
    opt.load_state_dict({"state": state, "param_groups": groups})


def _shard(value: Any, parameter: nn.Parameter) -> Any:
    """Return this rank's shard of a full tensor with the shape of a sharded parameter; other values unchanged."""
    if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return read_shard(parameter, tuple(value.shape), value.dtype, lambda slices: value[slices])
    return value


def _parameter_names(model: nn.Module, opt: Optimizer) -> dict[nn.Parameter, str]:
    """Return the names of the model's parameters. Raises ``ValueError`` if the optimizer has another parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in opt.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"{type(opt).__name__} has a parameter that the model lacks: build it over model.parameters()."
                )
    return names


def _named_groups(opt: Optimizer, names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
    """Return the optimizer's ``param_groups`` with parameter names instead of parameters."""
    groups = []
    for group in opt.param_groups:
        groups.append({**group, "params": [names[parameter] for parameter in group["params"]]})
    return groups


def _names_in(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parameter names of all groups, in order."""
    names: list[str] = []
    for group in groups:
        names += group["params"]
    return names


class CheckpointerInterface(Protocol):
    """Interface of checkpointers with complete state dicts."""

    def load_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """Return the state dicts by kind, such as ``"model"``."""
        ...

    def save_checkpoint(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Write the state dicts."""
        ...


def get_path(input_dir: Path | str, filename: str, missing_ok: bool = False) -> Path:
    """Return the path of a file in a folder.

    Raises:
        CheckpointError: the folder does not exist, or the file does not and ``missing_ok`` is False.
    """
    folder = Path(input_dir)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: name the one with the checkpoint.")
    path = folder / filename
    if not missing_ok and not path.is_file():
        raise CheckpointError(f"{folder} has no file {filename}: download the checkpoint, or correct the name.")
    return path


def copy_files(
    input_dir: str | Path,
    output_dir: str | Path,
    *,
    ignore_suffixes: Sequence[str] | None = None,
    max_file_size_mb: int = 100,
) -> None:
    """Copy the small files of a checkpoint, such as its tokenizer, to another folder.

    Args:
        input_dir: folder to copy, with its subfolders; hidden files and folders are left out.
        output_dir: folder to copy to; existing files are kept.
        ignore_suffixes: files with these endings are left out.
        max_file_size_mb: larger files are left out with a warning.
    """
    suffixes = tuple(ignore_suffixes or ())
    for path in sorted(Path(input_dir).rglob("*")):
        relative = path.relative_to(input_dir)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if is_hidden or not path.is_file() or path.name.endswith(suffixes):
            continue
        if path.stat().st_size > max_file_size_mb * 2**20:
            get_logger().warning(f"{path} is larger than {max_file_size_mb} MiB and is not copied.")
            continue
        target = Path(output_dir) / relative
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def check_outdir_not_in_ckptdir(ckpt_dir: Path | str, out_dir: Path | str) -> bool:
    """Return True if ``out_dir`` is not inside ``ckpt_dir``.

    Raises:
        CheckpointError: it is.
    """
    source = Path(ckpt_dir).resolve()
    output = Path(out_dir).resolve()
    if source == output or source in output.parents:
        raise CheckpointError(f"output_dir: {out_dir} is inside the checkpoint's folder {ckpt_dir}: name another one.")
    return True


def get_recipe_checkpoint_path(
    output_dir: Path | str,
    checkpoint_dir: Path | str | None = None,
    recipe_checkpoint: str | None = None,
    should_load_recipe_state: bool = False,
) -> Path | None:
    """Return the path of the training state to resume from, or ``None`` if ``should_load_recipe_state`` is False.

    Args:
        output_dir: folder of the run.
        checkpoint_dir: accepted and ignored.
        recipe_checkpoint: name of the file in ``output_dir``; by default that of the newest epoch.
        should_load_recipe_state: whether the run resumes.

    Raises:
        CheckpointError: there is no such file.
    """
    if not should_load_recipe_state:
        return None
    folder = Path(output_dir)
    newest = get_largest_iter_folder(folder)
    candidates = [folder / RECIPE_STATE_DIRNAME / _RECIPE_STATE_FILE]
    if recipe_checkpoint is not None:
        candidates = [folder / recipe_checkpoint]
    elif newest is not None:
        candidates.insert(0, folder / newest / _RECIPE_STATE_FILE)
    for path in candidates:
        if path.is_file():
            return path
    raise CheckpointError(f"{candidates[-1]} does not exist: set resume_from_checkpoint to False, or correct the path.")


def get_adapter_checkpoint_path(
    output_dir: Path | str,
    adapter_checkpoint: str | None = None,
    should_load_recipe_state: bool = False,
    pattern: str = r"^epoch_(\d+)",
) -> Path | None:
    """Return the path of the adapter to resume from; ``None`` if there is none, or the run does not resume.

    Args:
        output_dir: folder of the run.
        adapter_checkpoint: name of the file in ``output_dir``; by default that of the newest checkpoint.
        should_load_recipe_state: whether the run resumes.
        pattern: regular expression of the names of checkpoints, with one group, the number.
    """
    if not should_load_recipe_state:
        return None
    if adapter_checkpoint is not None:
        return get_path(output_dir, adapter_checkpoint)
    newest = get_largest_iter_folder(output_dir, pattern)
    if newest is None:
        return None
    path = Path(output_dir) / newest / f"{ADAPTER_MODEL_FNAME}.pt"
    return path if path.is_file() else None


def get_model_checkpoint_path(
    checkpoint_files: Sequence[str] | Mapping[str, str],
    checkpoint_dir: Path | str,
    output_dir: Path | str,
    should_load_recipe_state: bool,
    has_adapter_checkpoint: bool,
) -> list[Path]:
    """Return the paths of the weight files, in order.

    Args:
        checkpoint_files: names of the files, or ``filename_format`` and ``max_filename``.
        checkpoint_dir: folder of the model that the run starts from.
        output_dir: folder of the run; a run that resumes without an adapter reads its newest epoch.
        should_load_recipe_state: whether the run resumes.
        has_adapter_checkpoint: whether an adapter is loaded on top of the first model.

    Raises:
        CheckpointError: a file does not exist.
    """
    names = checkpoint_files
    if isinstance(names, Mapping):
        names = FormattedCheckpointFiles.from_dict(names).build_checkpoint_filenames()
    folder = Path(checkpoint_dir)
    if should_load_recipe_state and not has_adapter_checkpoint:
        folder = Path(output_dir) / (get_largest_iter_folder(output_dir) or "")
    return sorted(get_path(folder, name) for name in names)
