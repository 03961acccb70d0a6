"""Compile a model layer by layer, in place."""

import functools
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchtune.training.activations import CheckpointedForward
from torchtune.utils import (
    UserError,
    allow_compiled_versions,
    compiled_with_backward,
    find_compiler,
    first_line,
    forbid_mixed_reductions,
    get_logger,
    has_cpp_compiler,
    log_once,
)

# Maximum number of compiled versions of one layer: for training, validation and reference (adapters off), with or
# without a shared prompt, with static or dynamic length. With torch's default limit of 8, some would run uncompiled.
_MAX_VERSIONS = 32


def _generates_cpp(model: nn.Module, backend: str) -> bool:
    """Return whether the backend writes C++ for ``model``: Inductor does for parameters on a CPU."""
    return backend == "inductor" and any(parameter.device.type == "cpu" for parameter in model.parameters())


def _check_toolchain(model: nn.Module, backend: str) -> None:
    """Raise before the first step if Inductor needs a C++ compiler (for a CPU) and finds none."""
    if _generates_cpp(model, backend) and not has_cpp_compiler():
        raise UserError(
            "compile: torch.compile on a CPU needs a C++ compiler and finds none: install g++ (or name yours in the "
            "environment variable CXX), or set compile=False."
        )


def _backend() -> str:
    """Return the name of the compiler, at each call, because a recipe may set the variable after the import."""
    return os.environ.get("TORCH_COMPILE_BACKEND", "inductor")


@functools.cache  # the same object each time: layers that are compiled with it share their code
def _with_fallback(backend: str) -> Callable[..., Any]:
    """Return a backend that runs a graph uncompiled, and says so once, if the compiler fails on it."""
    compile_graph = find_compiler(backend)

    def compile_or_run(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        try:
            with compiled_with_backward():  # its failure, too, is known here
                return compile_graph(graph, inputs, **options)
        except Exception as error:  # noqa: BLE001 - of any kind: it is the compiler's, and the graph runs without it
            reason = f"{type(error).__name__}: {first_line(error)}"
            log_once(
                get_logger(),
                f"compile: {backend} failed on a part of the model, which runs uncompiled, slower and with the same "
                f"results ({reason}).",
                level=logging.WARNING,
            )
            return graph.forward

    return compile_or_run


def _compile_module(module: nn.Module, backend: str) -> None:
    """Compile ``module`` in place.

    A checkpointed module is compiled inside the checkpoint, because a graph break inside a checkpoint would disable
    compilation; the backward pass recomputes with the compiled code. A module with selective checkpointing, which
    decides per operation, is compiled as a whole. ``Module.compile`` has no effect on torch's own modules, so their
    forward is compiled instead.
    """
    forward = module.forward
    if isinstance(forward, CheckpointedForward) and "context_fn" not in forward.kwargs:
        forward.forward = torch.compile(forward.forward, backend=_with_fallback(backend))
    elif type(module).__module__.startswith("torch.nn."):
        module.forward = torch.compile(forward, backend=_with_fallback(backend))
    else:
        module.compile(backend=_with_fallback(backend))


def compile_model(model: nn.Module, verbose: bool = True) -> None:
    """Compile every transformer layer of ``model`` in place; parameter names and the state dict do not change.

    Layers share their compiled code. The first sequence length compiles with static shapes, the second with dynamic
    shapes, which further lengths reuse. The environment variable ``TORCH_COMPILE_BACKEND`` sets the backend
    (``inductor``). A model without transformer layers is compiled as a whole. A part on which the compiler fails runs
    uncompiled, which is logged once.

    Args:
        model: materialized model, with activation checkpointing already applied.
        verbose: log the compilation.

    Raises:
        UserError: the model is on a CPU and there is no C++ compiler.
    """
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.modules.mixers import GatedDeltaNet

    backend = _backend()
    _check_toolchain(model, backend)
    allow_compiled_versions(_MAX_VERSIONS)
    if any(isinstance(module, GatedDeltaNet) for module in model.modules()):
        forbid_mixed_reductions()  # with which the compiler fails on its backward pass
    layers = [module for module in model.modules() if isinstance(module, TransformerSelfAttentionLayer)]
    for module in layers or [model]:
        _compile_module(module, backend)
    if not verbose:
        return
    # Warnings that the compiler's own modules raise are no news to a user.
    warnings.filterwarnings("ignore", module=r"torch\.(_inductor|_dynamo|_functorch|jit)\b")
    compiled_parts = type(model).__name__
    if layers:
        compiled_parts = f"{len(layers)} layers and the loss"
    duration = "the first steps take longer"
    if _generates_cpp(model, backend):
        duration = "on a CPU, C++ that takes a minute or more to build"
    get_logger().info(
        f"Compiling {compiled_parts} with {backend}: {duration}, at the first batch and at one of another length."
    )


def compile_loss(loss: nn.Module, verbose: bool = True) -> nn.Module:
    """Compile a loss in place and return it.

    A loss with a method ``apply_compile_strategy`` compiles itself.

    Args:
        loss: the loss.
        verbose: log the compilation.

    Raises:
        UserError: the loss has parameters on a CPU and there is no C++ compiler.
    """
    backend = _backend()
    _check_toolchain(loss, backend)
    if hasattr(loss, "apply_compile_strategy"):
        loss.apply_compile_strategy(backend=_with_fallback(backend))
    else:
        _compile_module(loss, backend)
    if verbose:
        get_logger().debug(f"Compiling {type(loss).__name__} with {backend}.")  # the message about the model covers it
    return loss
