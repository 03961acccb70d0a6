"""Training in recipes copied from earlier releases: arguments, process groups, FSDP, context parallelism, reports.

Recipes of this library use :mod:`torchtune.training`, :class:`torchtune.modules.optim.OptimizerInBackward` and
:class:`torchtune.reports.RunReport`.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtune.checkpoints import check_training_state
from torchtune.config import Document, RecipeSettingsError, apply_overrides, read_document
from torchtune.modules import MultiHeadAttention
from torchtune.modules.mixers import RecurrentMixer
from torchtune.modules.optim import load_by_name
from torchtune.modules.parallel import shard_sequences
from torchtune.training import is_distributed, parallel, scale_grads_
from torchtune.training.parallel import ParallelDimsError
from torchtune.utils import UserError, deprecated
from torchtune.utils import get_world_size_and_rank as _get_world_size_and_rank

Context = contextlib.AbstractContextManager[None]

# Attributes of a recipe that its report reads.
_ATTRIBUTES = (
    "cfg",
    "model",
    "loader",
    "loader_val",
    "dims",
    "device",
    "checkpointer",
    "best",
    "step_metrics",
    "total_steps",
    "global_step",
)


class TuneRecipeArgumentParser(argparse.ArgumentParser):
    """Argument parser with the settings of the file ``--config`` as defaults."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_argument("--config", type=str, required=True, help="path of a config")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        """Return the settings of the file, and the overrides ``key=value`` and ``~key``.

        Raises:
            UserError: the file cannot be read, or an argument is neither an option nor an override.
        """
        options, overrides = super().parse_known_args(*args, **kwargs)
        for argument in overrides:
            if argument.startswith("-"):
                raise UserError(f"{argument} is not an option of a recipe: settings are written key=value.")
        document = read_document(options.config)
        document.check()
        del options.config
        # Options of the command line take precedence over the file.
        settings = {**document.data, **vars(options)}
        return argparse.Namespace(**settings), overrides


def _merge_yaml_and_cli_args(yaml_args: argparse.Namespace, cli_args: Sequence[str]) -> Any:
    """Return the settings of a file with overrides applied, as a ``DictConfig``.

    Raises:
        ConfigError: an override cannot be applied.
    """
    from omegaconf import OmegaConf

    document = Document(dict(vars(yaml_args)))
    apply_overrides(document, cli_args)
    document.check()
    return OmegaConf.create(document.data)


@deprecated("Use torch.distributed.init_process_group instead.")
def init_distributed(**kwargs: Any) -> bool:
    """Initialize the process group with torchrun's environment.

    Args:
        **kwargs: arguments of ``torch.distributed.init_process_group``.

    Returns:
        Whether torchrun started this process.

    Raises:
        RuntimeError: the process group is already initialized.
    """
    if not is_distributed():
        return False
    if dist.is_initialized():
        raise RuntimeError("init_distributed: the process group exists already: call it once.")
    dist.init_process_group(**kwargs)
    return True


@deprecated("Use torchtune.utils.get_world_size_and_rank instead.")
def get_world_size_and_rank() -> tuple[int, int]:
    """Return world size and rank of the process group; (1, 0) without one.

    Example:
        >>> torchtune.training.get_world_size_and_rank()
        (1, 0)
    """
    return _get_world_size_and_rank()


@deprecated("Use torchtune.training.scale_grads_ on model.parameters() instead.")
def scale_grads(model: nn.Module, scaler: torch.Tensor) -> None:
    """Multiply the gradients of ``model`` by ``scaler`` (a scalar tensor) in place."""
    scale_grads_(model.parameters(), scaler)


def shard_model(
    model: nn.Module,
    shard_conditions: Sequence[parallel.ShardCondition],
    *,
    cpu_offload: bool,
    reshard_after_forward: bool = True,
    dp_mesh: Any = None,
) -> None:
    """Shard parameters over the data-parallel ranks with FSDP2: each selected module separately, the rest together.

    Gradients are *averaged* over ranks, as older recipes expect; they scale gradients by the number of ranks divided by
    the number of tokens. :func:`torchtune.training.parallelize` sums gradients instead.

    Args:
        model: changed in place.
        shard_conditions: a module is sharded separately if any ``condition(name, module)`` is true.
        cpu_offload: keep the shards in host memory.
        reshard_after_forward: free a layer's full parameters after its forward pass.
        dp_mesh: mesh to shard over; two dimensions mean HSDP. All ranks by default.

    Raises:
        ValueError: no module is selected.
    """
    from torch.distributed.fsdp import FSDPModule

    parallel.shard_model(
        model,
        shard_conditions,
        cpu_offload=cpu_offload,
        reshard_after_forward=reshard_after_forward,
        dp_mesh=dp_mesh,
    )
    ranks = dist.get_world_size() if dp_mesh is None else dp_mesh.size()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(ranks))
    parallel.unshard_output(model)


def get_train_context(enable_loss_parallel: bool) -> Callable[..., Context]:
    """Return the context for forward and backward passes, for ``with train_context(cp_context):``.

    Args:
        enable_loss_parallel: compute the loss on logits sharded over the vocabulary.
    """

    @contextlib.contextmanager
    def context(cp_context: Context | None = None) -> Iterator[None]:
        from torch.distributed.tensor.parallel import loss_parallel

        with contextlib.ExitStack() as stack:
            if enable_loss_parallel:
                stack.enter_context(loss_parallel())
            if cp_context is not None:
                stack.enter_context(cp_context)
            yield

    return context


def get_context_parallel_manager(
    *,
    enabled: bool = False,
    rotate_method: str = "allgather",
    world_mesh: Any,
    model: nn.Module,
) -> Callable[[Sequence[torch.Tensor]], Context]:
    """Return the context manager for context parallelism over the mesh dimension ``cp``.

    Inside ``with manager([tokens, labels, ...]):`` the tensors [b, s, ...] hold this rank's chunk along ``s``; after
    the block they are full again. The model is changed permanently by
    :func:`torchtune.modules.parallel.shard_sequences`. Gradients must be reduced over ``cp``, too: shard parameters
    over the mesh dimension ``dp_shard_cp``.

    Args:
        enabled: if False, the context does nothing.
        rotate_method: accepted and ignored: one all-to-all redistributes queries, keys and values instead of a ring.
        world_mesh: from ``ParallelDims.build_mesh``.
        model: its attention layers and mixers are changed, and a hook computes the chunk's positions if the batch has
            none.

    Raises:
        ParallelDimsError: the ranks do not divide the heads or, inside the context, the sequence length.
    """
    if not enabled:
        return lambda buffers: contextlib.nullcontext()
    mesh = world_mesh["cp"]
    _check_heads(model, mesh.size())  # before the model is changed
    shard_sequences(model, mesh.get_group())

    @contextlib.contextmanager
    def manager(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        # [b, s, ...]: other buffers have no sequence to divide.
        sharded = [buffer for buffer in buffers if isinstance(buffer, torch.Tensor) and buffer.dim() > 1]
        ranks = mesh.size()
        rank = mesh.get_local_rank()
        for buffer in sharded:
            length = buffer.shape[1]
            if length % ranks:
                raise ParallelDimsError(
                    f"context_parallel_dim is {ranks}: it must divide the length of the batch ({length}): pad it, for "
                    "example with padded_collate_sft(pad_to_multiple_of=parallel_dims.min_seq_len_divisor)."
                )
        hook = model.register_forward_pre_hook(_make_position_hook(rank), with_kwargs=True)
        # The data of the caller's own tensors are replaced, as in torch's context_parallel.
        full_data = [buffer.data for buffer in sharded]
        for buffer in sharded:
            buffer.data = buffer.data.chunk(ranks, dim=1)[rank].contiguous()
        try:
            yield
        finally:
            hook.remove()
            for buffer, data in zip(sharded, full_data, strict=True):
                buffer.data = data

    return manager


def _check_heads(model: nn.Module, ranks: int) -> None:
    for module in model.modules():
        if isinstance(module, RecurrentMixer):
            obstacle = module.sharing_obstacle(ranks)
            if obstacle is not None:
                raise ParallelDimsError(f"context_parallel_dim is {ranks}: {obstacle}: set it to a size that fits.")
        if not isinstance(module, MultiHeadAttention):
            continue
        # With fewer key heads than ranks, ranks share one, which needs a whole number of ranks per key head.
        keys_fit = module.num_kv_heads % ranks == 0 or ranks % module.num_kv_heads == 0
        if module.num_heads % ranks or not keys_fit:
            raise ParallelDimsError(
                f"context_parallel_dim is {ranks}: it must divide the {module.num_heads} query heads of the model, and "
                f"divide its {module.num_kv_heads} key heads or be a multiple of them."
            )


def _make_position_hook(rank: int) -> Callable[..., Any]:
    """Return a forward pre-hook that passes a chunk's positions in the full sequence."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = args[0] if args else kwargs["tokens"]
        if kwargs.get("input_pos") is None:
            rows, length = tokens.shape
            positions = torch.arange(rank * length, (rank + 1) * length, device=tokens.device)
            kwargs = {**kwargs, "input_pos": positions.expand(rows, length)}
        return args, kwargs

    return hook


class OptimizerInBackwardWrapper:
    """Wrapper of one optimizer per parameter, which saves, loads and schedules them together.

    Args:
        optim_map: optimizer of every parameter, by parameter name.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizers = torchtune.training.OptimizerInBackwardWrapper({"weight": torch.optim.SGD([weight], lr=0.1)})
        >>> optimizers.get_optim_key("lr")
        0.1
    """

    def __init__(self, optim_map: dict[str, Optimizer]) -> None:
        if not optim_map:
            raise ValueError("OptimizerInBackwardWrapper needs at least one optimizer.")
        self.optim_map = optim_map
        self.lr_scheduler: LRScheduler | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of every optimizer, by parameter name."""
        return {name: optimizer.state_dict() for name, optimizer in self.optim_map.items()}

    def load_state_dict(self, optim_ckpt_map: dict[str, Any]) -> None:
        """Load the result of ``state_dict``. Raises ``ValueError`` if the names differ."""
        load_by_name(self.optim_map, optim_ckpt_map)

    def get_optim_key(self, key: str) -> Any:
        """Return a setting (``"lr"`` …) of the first optimizer; all have the same settings."""
        return next(iter(self.optim_map.values())).param_groups[0][key]

    def set_lr_scheduler(self, lr_scheduler: LRScheduler) -> None:
        """Use a schedule attached to one of the optimizers for all of them."""
        self.lr_scheduler = lr_scheduler
        self._copy_lr_to_all()

    def step_lr_scheduler(self, epoch: int | None = None) -> None:
        """Step the schedule and set its rate in every optimizer.

        Raises:
            RuntimeError: no schedule was set.
        """
        self.get_last_lr()  # raises
        if epoch is None:
            self.lr_scheduler.step()
        else:
            self.lr_scheduler.step(epoch)
        self._copy_lr_to_all()

    def _copy_lr_to_all(self) -> None:
        rate = self.get_last_lr()
        for optimizer in self.optim_map.values():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def get_last_lr(self) -> float:
        """Return the rate of the schedule's last step.

        Raises:
            RuntimeError: no schedule was set.
        """
        if self.lr_scheduler is None:
            raise RuntimeError("The optimizer needs a schedule: call set_lr_scheduler first.")
        return self.lr_scheduler.get_last_lr()[0]


def create_optim_in_bwd_wrapper(
    model: torch.nn.Module, optim_dict: dict[torch.nn.Parameter, Optimizer]
) -> OptimizerInBackwardWrapper:
    """Wrap optimizers by the parameter names of ``model``.

    Args:
        model: model of the parameters.
        optim_dict: optimizer of every trained parameter.
    """
    optim_map = {}
    for name, parameter in model.named_parameters():
        if parameter in optim_dict:
            optim_map[name] = optim_dict[parameter]
    return OptimizerInBackwardWrapper(optim_map)


def register_optim_in_bwd_hooks(model: torch.nn.Module, optim_dict: dict[torch.nn.Parameter, Optimizer]) -> None:
    """Register hooks that step every parameter when its gradient is accumulated, and then free the gradient.

    Args:
        model: model that gets the hooks.
        optim_dict: optimizer of every trained parameter.
    """

    def step(parameter: torch.Tensor) -> None:
        optim_dict[parameter].step()
        optim_dict[parameter].zero_grad(set_to_none=True)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)


class RunReport:
    """Report of a run, from the attributes of its recipe; recipes build :class:`torchtune.reports.RunReport` now.

    Args:
        recipe: recipe after ``setup``.

    Raises:
        RecipeSettingsError: the recipe lacks an attribute, or there will be no validation although the settings need
            one.
        UserError: the data has no images and the text decoder is frozen.

    Example:
        >>> report = torchtune.training.RunReport(recipe)  # doctest: +SKIP
    """

    def __init__(self, recipe: Any) -> None:
        # Two packages that nothing else in this file needs.
        from torchtune import reports
        from torchtune.rlhf.loss import KTOLoss

        for name in _ATTRIBUTES:
            if not hasattr(recipe, name):
                raise RecipeSettingsError(
                    f"{type(recipe).__name__} has no attribute '{name}' after setup, which training.RunReport reads: "
                    "set it, or leave the report out of recipe_main."
                )
        if hasattr(recipe, "training_state"):
            check_training_state(recipe.training_state())
        # KTO compares an answer with that of another row, so that its batches for the report have at least two rows.
        rows_per_loss = 2 if isinstance(getattr(recipe, "loss_fn", None), KTOLoss) else 1
        self._recipe = recipe
        self._report = reports.RunReport(
            recipe.cfg,
            str(sys.modules[type(recipe).__module__].__file__),  # the recipe's file
            recipe.dims,
            recipe.device,
            recipe.model,
            getattr(recipe, "tokenizer", None),
            recipe.loader,
            recipe.loader_val,
            recipe.checkpointer,
            recipe.best,
            recipe.step_metrics,
            recipe.total_steps,
            rows_per_loss=rows_per_loss,
        )
        # Recipes that sample are measured by rewards, which their losses do not show; others by the loss, if they can.
        self._measured_by: dict[str, Any] = {}
        if hasattr(recipe, "sample"):
            self._measured_by["sample"] = recipe.sample
        elif hasattr(recipe, "compute_loss"):
            self._measured_by["compute_loss"] = recipe.compute_loss
        self._report.start(recipe.global_step, **self._measured_by)

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, *error: Any) -> None:
        self._report.__exit__(*error)

    def end(self, code: int) -> int:
        """Log the result of the run, on all ranks after the last step. Return ``code``, the result of ``train``."""
        return self._report.end(self._recipe.global_step, code, **self._measured_by)
