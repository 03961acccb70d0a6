"""Process groups, FSDP and context parallelism for recipes copied from earlier releases."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtune.modules import MultiHeadAttention
from torchtune.modules.mixers import RecurrentMixer
from torchtune.modules.parallel import shard_sequences
from torchtune.training import is_distributed, parallel, scale_grads_
from torchtune.training.parallel import ParallelDimsError
from torchtune.utils import deprecated
from torchtune.utils import get_world_size_and_rank as _get_world_size_and_rank

Context = contextlib.AbstractContextManager[None]


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
    _check_heads(model, mesh.size())
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
