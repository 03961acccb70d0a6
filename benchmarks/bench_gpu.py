"""Training speed and peak memory on a GPU, beside a plain loop over a transformers model on the same machine.

    python benchmarks/bench_gpu.py                     # all shapes, both sides, compiled
    python benchmarks/bench_gpu.py --only llama-8b-lora --sides ours --steps 20
    python benchmarks/bench_gpu.py --tiny              # the same code on a CPU, to see that it runs

Weights are random, which changes no speed; nothing is downloaded. A step is one batch of packs, filled with documents
of about a quarter of a pack and labelled throughout: forward, backward, AdamW, in bf16. Every run is a process of its
own. Both sides see the same tokens. Ours keeps documents apart and steps the optimizer as recipes do by default; the
loop treats every pack as one causal row, the fastest thing that a transformers model does without further kernels.

"tok/s" is the median step after the warm-up. "MFU" counts only what the work needs, for both sides alike: products
with weights (with a frozen weight no gradient of its own), attention inside documents, the output at labelled
positions; recomputation and padding count nothing. It is relative to --peak-tflops, 989 for bf16 on an H100 or H200.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchtune import training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, collate_documents
from torchtune.models import Description, ModelSpec, build
from torchtune.models.llama3_1 import llama3_1_8b
from torchtune.models.llama3_2 import llama3_2_1b
from torchtune.models.qwen3 import qwen3_0_6b_base
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA

RANK = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table: a shape, a method, a batch, and what it is meant to reach on an H200."""

    builder: Callable[[], torch.nn.Module]
    lora: bool
    pack: int  # tokens of a pack
    packs: int  # packs of a step
    target: str

    def described(self, tiny: bool) -> tuple[Description, ModelSpec]:
        """The shape and its family; ``tiny`` keeps the family's habits only."""
        with torch.device("meta"):
            model = self.builder()
        if not tiny:
            return model.description, model.spec
        sizes = {"vocab_size": 512, "num_layers": 2, "embed_dim": 64, "intermediate_dim": 128}
        heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope_dim": 16}
        return dataclasses.replace(model.description, **sizes, **heads), model.spec


CASES = {
    "llama-1b-full": Case(llama3_2_1b, lora=False, pack=4096, packs=4, target="48k tok/s"),
    "llama-8b-lora": Case(llama3_1_8b, lora=True, pack=4096, packs=2, target="14k tok/s"),
    "qwen3-0.6b-full": Case(qwen3_0_6b_base, lora=False, pack=8192, packs=1, target="55k tok/s, 20 GiB"),
}


def draw_step(case: Case, vocab_size: int, index: int) -> dict[str, Any]:
    """The batch of step ``index``, the same for both sides."""
    generator = torch.Generator().manual_seed(index)
    documents = []
    for _ in range(case.packs):
        left = case.pack
        while left:
            drawn = int(torch.empty(1).log_normal_(0.0, 0.5, generator=generator).mul(case.pack / 4))
            length = left if left - drawn < 8 else max(drawn, 8)
            tokens = torch.randint(vocab_size, (length,), generator=generator)
            labels = torch.cat([tokens[1:], torch.tensor([CROSS_ENTROPY_IGNORE_IDX])])
            documents.append({"tokens": tokens, "labels": labels})
            left -= length
    return collate_documents(documents)


def needed_flops(d: Description, lora: bool, batch: dict[str, Any]) -> float:
    """Floating-point operations that a training step on this batch cannot do without."""
    tokens, lengths = batch["tokens"].numel(), batch["documents"].lengths
    labelled = int((batch["labels"] != CROSS_ENTROPY_IGNORE_IDX).sum())
    shapes = [(d.embed_dim, d.q_dim), (d.embed_dim, d.kv_dim), (d.embed_dim, d.kv_dim), (d.q_dim, d.embed_dim)]
    shapes += 3 * [(d.embed_dim, d.intermediate_dim)]
    weights = d.num_layers * sum(a * b for a, b in shapes)
    adapters = d.num_layers * sum(RANK * (a + b) for a, b in shapes) if lora else 0
    passes = 2 if lora else 3  # forward, gradient of the input, and of the weight if it is trained
    products = 2 * passes * (weights * tokens + d.vocab_size * d.embed_dim * labelled) + 6 * adapters * tokens
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return products + 3 * 4 * d.num_layers * d.q_dim * pairs


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Fill weights that have just been allocated: matrices small and random, norms one."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(1.0)


def make_ours(
    case: Case, arguments: argparse.Namespace, device: torch.device
) -> Callable[[dict[str, Any]], torch.Tensor]:
    """A training step of this library, put together as in its recipes."""
    with training.set_default_dtype(torch.bfloat16), torch.device("meta"):
        model = build(*case.described(arguments.tiny))
        if case.lora:
            apply_conversions(model, [LoRA(rank=RANK, alpha=2 * RANK, apply_to_mlp=True)])
    model.to_empty(device=device)
    randomize(model)
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    if arguments.compile:
        training.compile_model(model, verbose=False)
        training.compile_loss(loss_fn, verbose=False)
    factory = partial(torch.optim.AdamW, lr=1e-5, fused=True)
    optimizer = training.setup_optimizer(factory, model, precision=arguments.precision)

    def step(batch: dict[str, Any]) -> torch.Tensor:
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        labels = batch.pop("labels")
        loss = loss_fn(model(**batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_transformers(
    case: Case, arguments: argparse.Namespace, device: torch.device
) -> Callable[[dict[str, Any]], torch.Tensor]:
    """A training step of the same shape in transformers, with peft for adapters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    description, spec = case.described(arguments.tiny)
    settings = spec.to_hf_config(description)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.config.use_cache = False
    if case.lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    forward = torch.compile(model) if arguments.compile else model

    def step(batch: dict[str, Any]) -> torch.Tensor:
        tokens = batch["tokens"].view(case.packs, case.pack).to(device, non_blocking=True)
        # transformers shifts labels itself
        labels = torch.where(batch["labels"] == CROSS_ENTROPY_IGNORE_IDX, CROSS_ENTROPY_IGNORE_IDX, batch["tokens"])
        loss = forward(input_ids=tokens, labels=labels.view(case.packs, case.pack).to(device, non_blocking=True)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(side: str, case: Case, arguments: argparse.Namespace) -> dict[str, float]:
    """Time steps in this process: figures of one cell of the table."""
    torch.manual_seed(0)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    description, _ = case.described(arguments.tiny)
    batches = [draw_step(case, description.vocab_size, i) for i in range(arguments.warmup + arguments.steps)]
    step = {"ours": make_ours, "transformers": make_transformers}[side](case, arguments, device)
    seconds = []
    for batch in batches:
        synchronize()
        start = time.perf_counter()
        loss = step(batch)
        synchronize()
        seconds.append(time.perf_counter() - start)
    if not torch.isfinite(loss):
        raise SystemExit(f"{side}: the loss is {loss.item()}.")
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    timed = list(zip(seconds, batches, strict=True))[arguments.warmup :]
    rate = statistics.median(needed_flops(description, case.lora, batch) / second for second, batch in timed)
    return {
        "tokens_per_second": case.packs * case.pack / statistics.median(seconds[arguments.warmup :]),
        "mfu": rate / (arguments.peak_tflops * 1e12),
        "peak_gib": peak,
        "warmup_seconds": sum(seconds[: arguments.warmup]),
    }


def measure_apart(side: str, name: str) -> dict[str, float]:
    """The same in a process of its own, with the arguments of this one."""
    command = [sys.executable, *sys.argv, "--child", f"{side},{name}"]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{side} {name} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    """Parse, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"cases, separated by commas, of {', '.join(CASES)}")
    parser.add_argument("--sides", default="ours,transformers")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=6, help="steps before them, compilation included")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: not with --tiny")
    parser.add_argument("--precision", default="stochastic_rounding", help="our optimizer_precision")
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, only to try it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = CASES
    if arguments.compile is None:
        arguments.compile = not arguments.tiny
    if arguments.tiny:
        cases = {name: dataclasses.replace(case, pack=128, target="none: tiny") for name, case in CASES.items()}
    elif not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device: use --tiny to try this on a CPU.")
    if arguments.child:
        side, name = arguments.child.split(",")
        print("RESULT " + json.dumps(measure(side, cases[name], arguments)))
        return
    device = "CPU" if arguments.tiny else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, bf16, {'compiled' if arguments.compile else 'eager'}")
    print(f"{'case':<16} {'side':<13} {'tok/s':>8} {'MFU':>6} {'peak GiB':>9} {'warm-up s':>10}  target")
    for name in arguments.only.split(",") if arguments.only else cases:
        for side in arguments.sides.split(","):
            figures = measure_apart(side, name)
            print(
                f"{name:<16} {side:<13} {figures['tokens_per_second']:>8.0f} {figures['mfu']:>6.1%} "
                f"{figures['peak_gib']:>9.1f} {figures['warmup_seconds']:>10.1f}  "
                f"{cases[name].target if side == 'ours' else ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
