"""``CheckpointClient`` loads, saves and resumes, for recipes copied from earlier releases.

The client wraps a checkpointer. Synchronous checkpoints use the checkpointer's ``load_checkpoint`` and
``save_checkpoint`` with full state dicts, in the layout of earlier releases (``recipe_state.pt``). Asynchronous
checkpoints use its ``save`` and ``resume``, and are sharded.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import nn
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
    complete_directories,
)
from torchtune.compat._optimizer_in_backward import OptimizerInBackwardWrapper
from torchtune.compat._state_dicts import gather_cpu_state_dict, get_full_optimizer_state_dict
from torchtune.modules.conversion import get_conversions
from torchtune.modules.peft import LoRA, get_adapter_params, get_merged_lora_ckpt
from torchtune.training.parallel import Ranks
from torchtune.utils import get_device, get_world_size_and_rank

_TOTAL_STEPS_KEY = "total_training_steps"
# Keys of the training state of asynchronous checkpoints.
_OPTIMIZER = "optimizer"
_PROGRESS = "progress"


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
            total_steps = training_progress.total_training_steps or float("inf")
            intermediate = (number or 0) < total_steps
        else:
            number = epoch
            intermediate = epoch + 1 < training_progress.total_epochs

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
            self._checkpointer.close()  # the last checkpoint waits for those that are still being written
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
        tensors = gather_cpu_state_dict(model, is_rank_zero, self._device, adapter_weights_only=adapter_only)
        checkpoint: dict[str, Any] = {}
        if adapter_params:
            checkpoint[ADAPTER_KEY] = {name: tensors[name] for name in adapter_params if name in tensors}
            if adapter_config is not None:
                checkpoint[ADAPTER_CONFIG] = dict(adapter_config)
        if adapter_only:
            return checkpoint
        if adapter_params and is_rank_zero:
            adapted_layer = next(module for module in model.modules() if hasattr(module, "adapter_params"))
            settings = adapter_config or {"r": adapted_layer.rank, "lora_alpha": adapted_layer.alpha}
            tensors = get_merged_lora_ckpt(dict(tensors), rank=settings["r"], alpha=settings["lora_alpha"])
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
            if (newest / "recipe_state.pt").is_file():
                raise CheckpointError(
                    f"{newest} was saved as a full state dict: resume it with enable_async_checkpointing=False."
                )
        point = self._checkpointer.find_resume_point()
        if point is None:
            raise CheckpointError(
                f"resume_from_checkpoint: {self._checkpointer.output_dir} holds no checkpoint: set it to False, or "
                "give the output_dir of the run."
            )
        progress: dict[str, Any] = {}
        self._checkpointer.resume(point, model, {_OPTIMIZER: optimizer, _PROGRESS: progress})
        if dataloader is not None and progress.get(DATALOADER_KEY) and hasattr(dataloader, "load_state_dict"):
            dataloader.load_state_dict(progress[DATALOADER_KEY])
        return {**progress, OPT_KEY: optimizer.state_dict()}
