"""The names of torch that are not public and that the library cannot do without, each with what it is for.

A release of torch may take any of them away: nothing else in the library names them, so that here is the one place to
mend. Where torch has a public name by now, that one is used.
"""

import warnings
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def flatten_mesh(mesh: Any, name: str) -> Any:
    """Join all dimensions of a device mesh into one, a process group of its own; torch has no public way."""
    return mesh._flatten(name)


class FrozenIntegers(TorchFunctionMode):
    """Context in which ``fully_shard`` accepts integer parameters: PyTorch 2.11 first lets all require gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.requires_grad_ and not (args[0].is_floating_point() or args[0].is_complex()):
            return args[0]
        return func(*args, **(kwargs or {}))


def set_collective_timeout(seconds: float, known: int = 0) -> int:
    """Set the time after which torch gives a collective up, in all process groups of this rank.

    Only ``torch.distributed`` itself can name all groups. ``set_timeout`` is public from 2.14 on.

    Args:
        seconds: the time.
        known: do nothing if there are no more groups than that.

    Returns:
        how many groups there are.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    groups = list(distributed_c10d._world.pg_map)
    if len(groups) <= known:
        return known
    with warnings.catch_warnings():  # for backends that have none
        warnings.filterwarnings("ignore", "Set timeout is now only supported", UserWarning)
        for group in groups:
            # a group that another thread is about to make has no ranks yet
            if group not in distributed_c10d._world.pg_group_ranks or dist.get_rank(group) < 0:
                continue
            if hasattr(dist, "set_timeout"):
                dist.set_timeout(timedelta(seconds=seconds), group)
            else:
                distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    return len(groups)


def allow_compiled_versions(most: int) -> None:
    """Let the compiler make up to ``most`` versions of a function, if its limit is lower; more run uncompiled."""
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, most)


def in_backward_pass() -> bool:
    """Whether autograd runs a backward pass in this thread: a forward pass inside of it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_function_transform() -> bool:
    """Whether ``torch.func`` or forward-mode AD is at work: most functions with a backward pass refuse them."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def saved_tensor_hooks() -> Any | None:
    """The innermost ``torch.autograd.graph.saved_tensors_hooks`` of this thread; checkpointing has its own."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def hooks_of_all_modules() -> tuple[Any, Any]:
    """The hooks on the forward passes of all modules, as torch keeps them: what is registered later appears in them."""
    return torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks


def record_memory_history(enabled: bool) -> None:
    """Let a snapshot of CUDA's memory say where blocks came from; the documentation of torch names these functions."""
    if enabled:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> Any:
    """What CUDA's memory is filled with, for https://pytorch.org/memory_viz."""
    return torch.cuda.memory._snapshot()


def verbose_profiling() -> Any:
    """Setting of ``torch.profiler`` without which ``with_stack`` records no stacks, where there is one."""
    profiler = torch._C._profiler
    return profiler._ExperimentalConfig(verbose=True) if hasattr(profiler, "_ExperimentalConfig") else None


def reduce_scatter_op() -> Any:
    """The operation that compiled and sharded models reduce gradients with, for rules on what is recomputed."""
    return torch.ops._c10d_functional.reduce_scatter_tensor.default


@cache
def onednn_computes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of ``dtype`` on this processor; where it does not, it raises."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    question = getattr(torch.ops.mkldnn, names.get(dtype, ""), None)
    return question is not None and question()


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` on CPU by oneDNN, without a gradient; float32 has no public way to it."""
    dense = None if bias is None else bias.contiguous()  # it takes strides of one for granted
    return torch.ops.mkldnn._linear_pointwise(x, weight, dense, "none", [], "")


def onednn_linear_op() -> Any | None:
    """The operation of :func:`onednn_linear`, for rules on what is recomputed; None in a build without oneDNN."""
    op = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if op is None else op.default


def onednn_layout(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the layout that :func:`onednn_linear` reads fastest."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, 64)  # it is the same for all small batches


def has_cpp_compiler() -> bool:
    """Whether the compiler that inductor writes C++ for can be found; only inductor knows where it looks."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True
