"""Run compiled layers uncompiled."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_ORIGINAL = "_torchdynamo_orig_callable"  # attribute of the function that torch.compile returns


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Context manager in which compiled layers of the model run uncompiled.

    Shapes of rows and caches change from step to step of generation, and most changes would recompile a layer. At its
    limit of recompilations, the compiler would also give up on training.
    """
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    wrapped = [vars(module).get("forward") for module in model.modules()]  # of recomputed layers: compiled inside
    inner = [(one, one.forward) for one in wrapped if hasattr(getattr(one, "forward", None), _ORIGINAL)]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        for one, call in inner:
            one.forward = getattr(call, _ORIGINAL)
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for one, call in inner:
            one.forward = call
