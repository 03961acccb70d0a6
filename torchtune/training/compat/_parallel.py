"""Process groups, FSDP and context parallelism as recipes copied from earlier releases call them."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtune.modules import MultiHeadAttention
from torchtune.modules.parallel import ContextParallelAttention
from torchtune.training._distributed import is_distributed
from torchtune.training._grad_scaler import scale_grads_
from torchtune.training.parallel import _parallelize
from torchtune.training.parallel._parallel_dims import ParallelDimsError
from torchtune.utils import deprecated
from torchtune.utils import get_world_size_and_rank as _get_world_size_and_rank

Context = contextlib.AbstractContextManager[None]


@deprecated("Use torch.distributed.init_process_group instead.")
def init_distributed(**kwargs: Any) -> bool:
    """Join the process group that torchrun prepared.

    Args:
        **kwargs: for ``torch.distributed.init_process_group``.

    Returns:
        Whether there is one.

    Raises:
        RuntimeError: the process group exists already.
    """
    if not is_distributed():
        return False
    if dist.is_initialized():
        raise RuntimeError("init_distributed: the process group exists already: call it once.")
    dist.init_process_group(**kwargs)
    return True


@deprecated("Use torchtune.utils.get_world_size_and_rank instead.")
def get_world_size_and_rank() -> tuple[int, int]:
    """World size and rank of the process group, (1, 0) without one.

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
    shard_conditions: Sequence[_parallelize.ShardCondition],
    *,
    cpu_offload: bool,
    reshard_after_forward: bool = True,
    dp_mesh: Any = None,
) -> None:
    """Shard parameters over data ranks with FSDP2: each chosen module by itself, the rest together.

    Gradients are *averaged* over ranks, as older recipes expect, which multiply them by the number of ranks over the
    number of tokens. :func:`torchtune.training.parallelize` sums them instead.

    Args:
        model: changed in place.
        shard_conditions: a module is sharded by itself if one of them says so, ``condition(name, module)``.
        cpu_offload: keep the shards in host memory.
        reshard_after_forward: free a layer's full parameters after its forward pass.
        dp_mesh: ranks to shard over; with two dimensions, HSDP. All ranks by default.

    Raises:
        ValueError: no module was chosen.
    """
    from torch.distributed.fsdp import FSDPModule

    _parallelize.shard_model(
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
    _parallelize._keep_output_whole(model)


class _TrainContext(contextlib.AbstractContextManager):
    """A context manager, and a function that makes one around another context."""

    def __init__(self, enable_loss_parallel: bool) -> None:
        self._enable_loss_parallel = enable_loss_parallel
        self._entered: list[Context] = []

    @contextlib.contextmanager
    def __call__(self, cp_context: Context | None = None) -> Generator[None, None, None]:
        with contextlib.ExitStack() as stack:
            if self._enable_loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            if cp_context is not None:
                stack.enter_context(cp_context)
            yield

    def __enter__(self) -> None:
        self._entered.append(self())
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


def get_train_context(enable_loss_parallel: bool) -> Any:
    """The context of forward and backward: ``with train_context(cp_context): ...`` or ``with train_context: ...``.

    Args:
        enable_loss_parallel: run the loss on logits that are sharded over the vocabulary.
    """
    return _TrainContext(enable_loss_parallel)


def get_context_parallel_manager(
    *,
    enabled: bool = False,
    rotate_method: str = "allgather",
    world_mesh: Any,
    model: nn.Module,
) -> Callable[[Sequence[torch.Tensor]], Context]:
    """Make the context in which every rank of the mesh dimension ``cp`` computes with its chunk of the sequences.

    Inside ``with manager([tokens, labels, ...]):`` the tensors [b, s, ...] are this rank's chunk along ``s``; after the
    block they are whole again. The model attends by :class:`torchtune.modules.parallel.ContextParallelAttention` from
    now on. Gradients must be reduced over the ranks of ``cp`` too: shard over the mesh dimension ``dp_shard_cp``.

    Args:
        enabled: without it the context changes nothing.
        rotate_method: accepted: queries, keys and values are exchanged by one all-to-all, there is no ring.
        world_mesh: from ``ParallelDims.build_mesh``.
        model: gets the attention, and positions of the chunk where the batch carries none.

    Raises:
        ParallelDimsError: the ranks do not divide the heads; inside the context, they do not divide the sequences.
    """
    if not enabled:
        return lambda buffers: contextlib.nullcontext()
    mesh = world_mesh["cp"]
    _check_heads(model, mesh.size())
    attention = ContextParallelAttention(mesh.get_group())
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.attention = attention

    @contextlib.contextmanager
    def manager(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        whole = [(buffer, buffer.data) for buffer in buffers if isinstance(buffer, torch.Tensor) and buffer.dim() > 1]
        ranks, rank = mesh.size(), mesh.get_local_rank()
        for _, data in whole:
            if data.shape[1] % ranks:
                raise ParallelDimsError(
                    f"context_parallel_dim is {ranks}: it must divide the length of the batch ({data.shape[1]}): pad "
                    "it, for example with padded_collate_sft(pad_to_multiple_of=parallel_dims.min_seq_len_divisor)."
                )
        hook = model.register_forward_pre_hook(_positions(rank), with_kwargs=True)
        for buffer, data in whole:
            buffer.data = data.chunk(ranks, dim=1)[rank].contiguous()
        try:
            yield
        finally:
            hook.remove()
            for buffer, data in whole:
                buffer.data = data

    return manager


def _check_heads(model: nn.Module, ranks: int) -> None:
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and (
            module.num_heads % ranks or (module.num_kv_heads % ranks and ranks % module.num_kv_heads)
        ):
            raise ParallelDimsError(
                f"context_parallel_dim is {ranks}: it must divide the {module.num_heads} query heads of the model, and "
                f"divide its {module.num_kv_heads} key heads or be a multiple of them."
            )


def _positions(rank: int) -> Callable[..., Any]:
    """A forward pre-hook that gives the tokens of a chunk their positions in the whole sequence."""

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
