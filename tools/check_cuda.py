"""Run every family's layers on fake CUDA tensors: which kernels attend, and where the host would wait (`make cuda`).

Needs a build of torch for CUDA, and neither a GPU nor a driver: fake tensors have shapes and devices, and no values.
What a driver would compile (flex attention) or be asked (compute capability) is answered here.
"""

import argparse
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune import training
from torchtune.data import Documents
from torchtune.modules.kernels import flex as flex_kernels
from torchtune.modules.transformer import text_decoder

DEVICE = torch.device("cuda:0")
# Parts of the names of operators that attend.
KERNELS = ("varlen_attn", "document_attention", "scaled_dot_product", "flex")
# Operators that need values: the host waits for the device.
SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default", "unique", "masked_select")
LENGTHS = (100, 300, 240)  # of the documents in a row


class Counting(TorchDispatchMode):
    """Counts operations by name, and answers those that would need values."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))

    def kernels(self) -> dict[str, int]:
        """Return how often each kernel of ``KERNELS`` was called, without those that were not."""
        calls = {}
        for kernel in KERNELS:
            count = sum(count for name, count in self.counts.items() if kernel in name)
            if count:
                calls[kernel] = count
        return calls

    def syncs(self) -> dict[str, int]:
        """Return how often each operator was called for which the host would wait."""
        calls = {}
        for name, count in self.counts.items():
            if any(sync in name for sync in SYNCS):
                calls[name] = count
        return calls


@contextmanager
def fake_cuda() -> Iterator[Counting]:
    """Context manager in which tensors are fake, and the answers of a driver are made up."""
    counting = Counting()

    def flex(q: Tensor, k: Tensor, v: Tensor, *, return_aux: Any = None, **options: Any) -> Any:
        """Take the place of a compiled flex attention; ``q`` is ``[b, h, s, d]``."""
        counting.counts["flex_attention"] += 1
        out = torch.empty_like(q)
        if return_aux is None:
            return out
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)  # [b, h, s]
        return out, mock.Mock(lse=lse)

    with (
        mock.patch.object(flex_kernels, "compile_flex_attention", return_value=flex),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
    ):
        yield counting


def fake_forward(model: nn.Module, counting: Counting) -> None:
    """Run a packed batch through a model on the meta device; only operators inside of layers are counted."""
    model.to_empty(device=DEVICE)
    tokens = torch.empty(1, sum(LENGTHS), dtype=torch.long, device=DEVICE)  # [b, s]
    positions = torch.empty_like(tokens)
    cu_seqlens = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device=DEVICE)

    def start(*_: Any) -> None:
        counting.__enter__()

    def stop(*_: Any) -> None:
        counting.__exit__(None, None, None)

    for layer in model.layers:
        layer.register_forward_pre_hook(start)
        layer.register_forward_hook(stop)
    model(tokens, input_pos=positions, documents=Documents(LENGTHS, cu_seqlens))


def families() -> dict[str, str]:
    """Return family -> builder of its first row among the models that configs are made for."""
    from make_configs import builder, models

    builders: dict[str, str] = {}
    for model in models()["models"]:
        builders.setdefault(model.partition("/")[0], builder(model))
    return builders


def build(family: str, builder: str, layers: int = 6) -> nn.Module:
    """Build a model on the meta device in bfloat16, with its first layers alone."""
    module = importlib.import_module(f"torchtune.models.{family}")
    with training.set_default_dtype(torch.bfloat16), torch.device("meta"):
        model = text_decoder(getattr(module, builder)())
    del model.layers[layers:]
    return model


def main() -> int:
    """Print a line for each family; return 1 if one attends in Python, or makes the host wait."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.filterwarnings("ignore")
    num_failed = 0
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, six layers, documents of {LENGTHS} tokens")
    for family, builder in families().items():
        model = build(family, builder)
        with fake_cuda() as counting:
            fake_forward(model, counting)
        verdict = "ok"
        if counting.syncs() or "document_attention" in counting.kernels():
            verdict = "FAILS"
            num_failed += 1
        kernels = ", ".join(f"{name} {count}" for name, count in counting.kernels().items())
        print(f"{verdict:6}{family:14}{builder:24}{kernels}; host syncs: {counting.syncs() or 'none'}")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
