"""Compilation, layer by layer and in place."""

import os
import warnings

import torch

from torchtune.training.memory import CheckpointedForward
from torchtune.utils import UserError, get_logger, has_cpp_compiler
from torchtune.utils._torch_private import allow_compiled_versions


def _check_toolchain(model: torch.nn.Module, backend: str) -> None:
    """Inductor writes C++ for a CPU: say so before the first step if it cannot be compiled."""
    if backend != "inductor" or all(parameter.device.type != "cpu" for parameter in model.parameters()):
        return
    if not has_cpp_compiler():
        raise UserError(
            "compile: torch.compile on a CPU needs a C++ compiler and finds none: install g++ (or name yours in the "
            "environment variable CXX), or set compile=False."
        )


def _announce(what: str, module: torch.nn.Module, backend: str) -> None:
    """Say what is compiled, and hide what the compiler says about itself: warnings of its own imports and choices."""
    warnings.filterwarnings("ignore", module=r"torch\.(_inductor|_dynamo|_functorch|jit)\b")
    on_cpu = backend == "inductor" and any(parameter.device.type == "cpu" for parameter in module.parameters())
    takes = "on a CPU, C++ that takes a minute or more to build" if on_cpu else "the first steps take longer"
    get_logger().info(f"Compiling {what} with {backend}: {takes}, at the first batch and at one of another length.")


# Versions of a layer that are compiled at most: training, validation and the reference (adapters off), with a shared
# prompt or without, each of one length and of any. Torch's limit of 8 would leave some of them uncompiled.
_MOST_VERSIONS = 32


def _backend() -> str:
    return os.environ.get("TORCH_COMPILE_BACKEND", "inductor")


def _compile_module(module: torch.nn.Module, backend: str) -> None:
    """Compile ``module`` in place.

    A checkpointed one is compiled inside the checkpoint, which then recomputes by running the compiled code again: a
    graph that breaks inside a checkpoint would not be compiled at all. Selective checkpointing decides operation by
    operation, so that one is left to the compiler as a whole. ``Module.compile`` does nothing for torch's own
    modules: of these the function is compiled.
    """
    forward = module.forward
    if isinstance(forward, CheckpointedForward) and "context_fn" not in forward.kwargs:
        forward.forward = torch.compile(forward.forward, backend=backend)
    elif type(module).__module__.startswith("torch.nn."):
        module.forward = torch.compile(forward, backend=backend)
    else:
        module.compile(backend=backend)


def compile_model(model: torch.nn.Module, verbose: bool = True) -> None:
    """Compile every transformer layer of ``model`` in place; parameter names and state dicts stay as they are.

    Layers share their compiled code, so that it is made once, not once per layer. The first length is compiled as
    it is; at the second one the length becomes symbolic and no further length costs a compilation. The backend
    comes from the environment variable ``TORCH_COMPILE_BACKEND`` (``inductor``). A model without transformer layers
    is compiled as a whole.

    Args:
        model: materialised, with activation checkpointing already set.
        verbose: log what is done.

    Raises:
        UserError: the model is on a CPU and there is no C++ compiler.
    """
    from torchtune.modules import TransformerSelfAttentionLayer

    backend = _backend()
    _check_toolchain(model, backend)
    allow_compiled_versions(_MOST_VERSIONS)
    layers = [module for module in model.modules() if isinstance(module, TransformerSelfAttentionLayer)]
    for module in layers or [model]:
        _compile_module(module, backend)
    if verbose:
        _announce(f"{len(layers)} layers and the loss" if layers else type(model).__name__, model, backend)


def compile_loss(loss: torch.nn.Module, verbose: bool = True) -> torch.nn.Module:
    """Compile a loss in place and return it.

    A loss that has ``apply_compile_strategy`` decides which part of it is worth compiling.

    Args:
        loss: the loss.
        verbose: log what is done.

    Raises:
        UserError: the loss has parameters on a CPU and there is no C++ compiler.
    """
    backend = _backend()
    _check_toolchain(loss, backend)
    if hasattr(loss, "apply_compile_strategy"):
        loss.apply_compile_strategy(backend=backend)
    else:
        _compile_module(loss, backend)
    if verbose:
        get_logger().debug(f"Compiling {type(loss).__name__} with {backend}.")  # the model's message told of it
    return loss
