"""Speed and peak memory of the linear cross entropy, side by side with torch's own and with plain logits.

    python benchmarks/bench_loss.py [--tokens 2048 --dim 576 --vocab 49152 --labeled 0.5 --rounds 5 --device cpu]

Rounds are interleaved and the fastest counts (CPU time of the process on CPU, wall time on CUDA). Memory is the rise
of the peak during forward and backward, each variant in a process of its own on CPU. torch's function gets the
labeled rows only, as ours does, so that the same products are compared; "plain" projects every position.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.loss import LinearCrossEntropyLoss

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Head(nn.Module):
    """The part of a model that the loss looks at."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.output = nn.Linear(dim, vocab, bias=False)


def ours(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """The library's loss."""
    loss = LinearCrossEntropyLoss()
    loss.set_model_output(model)
    return loss(hidden, labels)


def torch_chunked(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """torch's chunked function on the labeled rows, with its own choice of chunks."""
    rows = (labels.flatten() != -100).nonzero().squeeze(1)
    options = nn.LinearCrossEntropyOptions()
    hidden = hidden.flatten(0, 1).index_select(0, rows)
    return F.linear_cross_entropy(hidden, model.output.weight, labels.flatten()[rows], options=options)


def torch_256(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """torch's chunked function on the labeled rows, 256 rows a chunk."""
    rows = (labels.flatten() != -100).nonzero().squeeze(1)
    options = nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=256)
    hidden = hidden.flatten(0, 1).index_select(0, rows)
    return F.linear_cross_entropy(hidden, model.output.weight, labels.flatten()[rows], options=options)


def plain(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """All logits in float32."""
    return F.cross_entropy(model.output(hidden).float().flatten(0, 1), labels.flatten())


VARIANTS: dict[str, Loss] = {"ours": ours, "plain": plain}
if hasattr(F, "linear_cross_entropy"):
    VARIANTS |= {"torch, auto chunks": torch_chunked, "torch, 256 rows": torch_256}


def make_inputs(args: argparse.Namespace, dtype: torch.dtype, *, trained: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """A projection, hidden states [1, s, d] and labels [1, s]."""
    torch.manual_seed(0)
    model = Head(args.dim, args.vocab).to(args.device, dtype)
    model.output.weight.requires_grad_(trained)
    hidden = torch.randn(1, args.tokens, args.dim, device=args.device).to(dtype).requires_grad_()
    labels = torch.randint(0, args.vocab, (1, args.tokens), device=args.device)
    labels[torch.rand(labels.shape, device=args.device) >= args.labeled] = -100
    return model, hidden, labels


def step(loss: Loss, model: nn.Module, hidden: Tensor, labels: Tensor) -> None:
    """Forward and backward."""
    hidden.grad = model.output.weight.grad = None
    loss(model, hidden, labels).backward()


def clock(device: str) -> float:
    """Seconds of work so far."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _resident(field: str) -> int:
    """Bytes that /proc reports as VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_memory(args: argparse.Namespace, name: str, dtype: torch.dtype, trained: bool) -> int:
    """Bytes by which forward and backward raise the peak."""
    inputs = make_inputs(args, dtype, trained=trained)
    if args.device == "cpu":
        tiny = argparse.Namespace(**{**vars(args), "tokens": 64, "dim": 16, "vocab": 64})
        step(VARIANTS[name], *make_inputs(tiny, dtype, trained=trained))  # libraries' own buffers
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = _resident("VmRSS")
        step(VARIANTS[name], *inputs)
        return _resident("VmHWM") - before
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(VARIANTS[name], *inputs)
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--labeled", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(
        f"[{args.tokens}, {args.dim}] x [{args.vocab}, {args.dim}], {args.labeled:.0%} labeled, {args.device}, ",
        end="",
    )
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for dtype_name, dtype in DTYPES.items():
        for trained in (False, True):
            inputs = make_inputs(args, dtype, trained=trained)
            seconds = dict.fromkeys(VARIANTS, float("inf"))
            for _ in range(args.rounds):
                for name, loss in VARIANTS.items():
                    start = clock(args.device)
                    step(loss, *inputs)
                    seconds[name] = min(seconds[name], clock(args.device) - start)
            del inputs
            print(f"\n{dtype_name}, projection {'trained' if trained else 'frozen'}")
            for name in VARIANTS:
                if args.device == "cpu":
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        peak = pool.apply(peak_memory, (args, name, dtype, trained))
                else:
                    peak = peak_memory(args, name, dtype, trained)
                ratio = seconds[name] / seconds["ours"]
                print(
                    f"  {name:20} {seconds[name] * 1e3:8.1f} ms  ({ratio:5.2f} x ours)  peak +{peak / 2**20:7.1f} MiB"
                )


if __name__ == "__main__":
    main()
