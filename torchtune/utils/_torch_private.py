"""Private functions of torch that the library needs.

A release of torch may remove any of them, so all uses are in this module. Public functions are used where torch has
one.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves as tree_leaves

# Kernels of oneDNN that a process keeps, of about 0.5 MiB each.
_ONEDNN_KERNELS = 128


def flatten_mesh(mesh: Any, name: str) -> Any:
    """Flatten all dimensions of a device mesh into one with a process group; torch has no public function for it."""
    return mesh._flatten(name)


class FrozenIntegers(TorchFunctionMode):
    """Context in which ``fully_shard`` accepts integer parameters.

    PyTorch 2.11 calls ``requires_grad_`` on all parameters, which fails for integers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.requires_grad_ and not (args[0].is_floating_point() or args[0].is_complex()):
            return args[0]
        return func(*args, **(kwargs or {}))


def set_collective_timeout(seconds: float, known: int = 0) -> int:
    """Set the timeout of collectives in all process groups of this rank.

    Only ``torch.distributed`` can list all groups. ``set_timeout`` is public since 2.14.

    Args:
        seconds: the timeout.
        known: do nothing if there are at most this many groups: the result of the last call, so that a caller can
            repeat the call, as new groups are made.

    Returns:
        Number of groups.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    groups = list(distributed_c10d._world.pg_map)
    if len(groups) <= known:
        return known
    with warnings.catch_warnings():  # backends without a timeout warn
        warnings.filterwarnings("ignore", "Set timeout is now only supported", UserWarning)
        for group in groups:
            # A group that another thread is creating has no ranks yet. The rank in a group of other ranks is -1.
            if group not in distributed_c10d._world.pg_group_ranks or dist.get_rank(group) < 0:
                continue
            if hasattr(dist, "set_timeout"):
                dist.set_timeout(timedelta(seconds=seconds), group)
            else:
                distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    return len(groups)


def allow_compiled_versions(most: int) -> None:
    """Raise the compiler's limit of recompilations per function to ``most``; over the limit, functions run eagerly."""
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, most)


def find_compiler(name: str) -> Callable[..., Callable[..., Any]]:
    """Return the compiler of graphs (backend) with a name that ``torch.compile`` takes."""
    return torch._dynamo.lookup_backend(name)


def compiler_options() -> list[str]:
    """Return the names of inductor's settings that ``torch.compile(options=...)`` takes in this release."""
    return torch._inductor.list_options()


def forbid_mixed_reductions() -> None:
    """Keep the compiler from fusing reductions over different dimensions, in this process.

    torch 2.14 fails on the backward pass of Gated DeltaNet with it (an AssertionError about two numbers of elements).
    """
    triton = torch._inductor.config.triton
    if hasattr(triton, "mix_order_reduction"):
        triton.mix_order_reduction = False


def compiled_with_backward() -> Any:
    """Return a context in which the compiler compiles the backward pass of a graph together with the forward pass.

    By default it does so at the first backward pass, inside autograd, where nobody can catch its error. In a release
    that lacks the option, the context changes nothing.
    """
    import torch._functorch.config as config

    if hasattr(config, "force_non_lazy_backward_lowering"):
        return config.patch(force_non_lazy_backward_lowering=True)
    return nullcontext()


def in_backward_pass() -> bool:
    """Return whether autograd runs a backward pass in this thread: a forward pass inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_function_transform() -> bool:
    """Return whether ``torch.func`` or forward-mode AD is active, which most autograd functions do not support."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def in_dispatch_mode() -> bool:
    """Return whether a dispatch mode (such as selective checkpointing, but not a tracer) intercepts operations.

    Example:
        >>> torchtune.utils.in_dispatch_mode()
        False
    """
    return is_in_torch_dispatch_mode(include_infra_modes=False)


def saved_tensor_hooks() -> Any | None:
    """Return the innermost ``torch.autograd.graph.saved_tensors_hooks`` of this thread; checkpointing sets its own."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def hooks_of_all_modules() -> tuple[Any, Any]:
    """Return torch's live dicts of global forward pre-hooks and forward hooks."""
    return torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks


def record_memory_history(enabled: bool) -> None:
    """Enable or disable recording of allocation stack traces for CUDA memory snapshots."""
    if enabled:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> Any:
    """Return a snapshot of CUDA memory, for https://pytorch.org/memory_viz."""
    return torch.cuda.memory._snapshot()


def verbose_profiling() -> Any:
    """Return the ``torch.profiler`` config that makes ``with_stack`` record stacks, or ``None`` if torch has none."""
    profiler = torch._C._profiler
    return profiler._ExperimentalConfig(verbose=True) if hasattr(profiler, "_ExperimentalConfig") else None


def reduce_scatter_op() -> Any:
    """Return the reduce-scatter operation of compiled, sharded models, for recomputation policies."""
    return torch.ops._c10d_functional.reduce_scatter_tensor.default


@cache
def onednn_computes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports matrix products in ``dtype`` on this CPU; otherwise it raises."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    question = getattr(torch.ops.mkldnn, names.get(dtype, ""), None)
    return question is not None and question()


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``F.linear`` on CPU with oneDNN, without autograd; torch has no public function for float32."""
    dense = None if bias is None else bias.contiguous()  # the operator assumes stride 1
    return torch.ops.mkldnn._linear_pointwise(x, weight, dense, "none", [], "")


def onednn_linear_op() -> Any | None:
    """Return the operation of :func:`onednn_linear`, for recomputation policies; ``None`` in a build without oneDNN."""
    op = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if op is None else op.default


@cache
def has_bfloat16_vectors_only() -> bool:
    """Return whether the CPU multiplies bfloat16 in vectors (AVX512_BF16) and has no tiles for it (AMX).

    Example:
        >>> isinstance(torchtune.utils.has_bfloat16_vectors_only(), bool)
        True
    """
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def bound_onednn_caches() -> None:
    """Bound the caches of oneDNN's kernels in this process, unless the user has set their sizes.

    oneDNN compiles a kernel for every shape of a matrix product and keeps the last 1024, and its wrapper in PyTorch
    keeps as many again: with batches of ever new lengths, half a GiB of code and buffers. They lie between the tensors,
    so that the C library cannot give the memory of these back, which costs as much once more. A step needs some dozens
    of kernels. The variables are read when the first product is computed; builds without oneDNN ignore them.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_ONEDNN_KERNELS))


def onednn_layout(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in the layout that is fastest for :func:`onednn_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, 64)  # one layout for all small batches


def has_cpp_compiler() -> bool:
    """Return whether inductor finds a C++ compiler.

    Example:
        >>> isinstance(torchtune.utils.has_cpp_compiler(), bool)
        True
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def one_compiler_thread() -> Any:
    """Return a context in which inductor compiles in this process, without a pool of processes that import torch.

    Example:
        >>> with torchtune.utils.one_compiler_thread():
        ...     double = torch.compile(lambda x: 2 * x)
    """
    import torch._inductor.config

    return torch._inductor.config.patch(compile_threads=1)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the errors of ``torch.compile``, which it raises before a compiled function computes anything.

    Example:
        >>> all(issubclass(error, Exception) for error in torchtune.utils.compiler_errors())
        True
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    return TorchDynamoException, FailOnRecompileLimitHit, InductorError, InvalidCxxCompiler


def fake_store() -> Any:
    """Return the store of a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fsdp_groups() -> type:
    """Return FSDP's class for a group of parameters with a common all-gather."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup


def shape_propagation() -> type:
    """Return DTensor's class for shape propagation."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator


def group_named(name: str) -> Any:
    """Return the process group with the name that functional collectives use."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)


def forget_meshes() -> None:
    """Clear DTensor's caches of shardings, whose keys do not tell meshes of different process groups apart."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
