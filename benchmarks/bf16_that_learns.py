"""Does bfloat16 training learn what float32 training learns? Loss curves of a full fine-tune, side by side.

    python benchmarks/bf16_that_learns.py --checkpoint DIR [--steps 22 --batch-size 8 --lr 2e-5 --out curves.json]

DIR is a Hugging Face folder of a small model, for example SmolLM2-135M-Instruct. Every run starts from the same
weights and sees the same batches, each twice: what the docstrings of Python's library say. Weights, gradients and
optimizer states of the bf16 runs are bfloat16 (fp32_master adds its float32 copies). Reported for each run: the
loss before every step, how far it is from float32, milliseconds per optimizer step (the fastest), the bytes that the
optimizer keeps, and the peak resident memory of the loop.
"""

import argparse
import gc
import importlib
import inspect
import itertools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from torchtune import checkpoints, training
from torchtune.data import BatchLoader, collate_documents
from torchtune.datasets import chat_dataset
from torchtune.models import from_hf_config
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.tokenizers import HuggingFaceModelTokenizer

MODULES = (
    "argparse ast asyncio.tasks calendar cmd codecs configparser csv datetime decimal difflib doctest fractions "
    "functools gettext heapq inspect ipaddress locale logging mailbox optparse os pathlib pickletools pprint random "
    "shlex shutil statistics string subprocess tarfile tempfile textwrap threading tokenize traceback typing "
    "unittest.mock urllib.parse urllib.request uuid warnings zipfile"
).split()
RUNS = [
    ("fp32", torch.float32, "param_dtype"),
    ("stochastic_rounding", torch.bfloat16, "stochastic_rounding"),
    ("fp32_master", torch.bfloat16, "fp32_master"),
    ("param_dtype", torch.bfloat16, "param_dtype"),
]


@dataclass
class Curve:
    """What one run gave."""

    name: str
    losses: list[float]
    step_ms: float
    state_mib: float
    peak_gib: float


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Write ``count`` conversations as JSON lines: a name of Python's library, and what its docstring says."""
    rows = []
    for module in map(importlib.import_module, MODULES):
        for name, value in sorted(vars(module).items()):
            public = not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
            text = inspect.getdoc(value) if public and callable(value) else None
            if text and len(text) > 200:
                rows.append((f"What does {module.__name__}.{name} do?", text[:700]))
    random.Random(seed).shuffle(rows)
    if len(rows) < count:
        raise SystemExit(f"There are {len(rows)} texts for {count} conversations: lower --steps or --batch-size.")
    with path.open("w", encoding="utf-8") as file:
        for question, answer in rows[:count]:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


def load(checkpoint: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model of ``checkpoint`` with weights of ``dtype``."""
    with training.set_default_dtype(dtype), torch.device("meta"):
        model = from_hf_config(checkpoint)
    checkpointer = checkpoints.FullModelHFCheckpointer(str(checkpoint), output_dir=None)
    checkpointer.load_model(model, device="cpu")
    return model


def run(name: str, dtype: torch.dtype, precision: str, data: Any, args: argparse.Namespace) -> Curve:
    """Fine-tune once."""
    training.set_seed(args.seed)
    model = load(args.checkpoint, dtype)
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    optimizer = training.setup_optimizer(
        lambda parameters: torch.optim.AdamW(parameters, lr=args.lr, fused=True), model, precision=precision
    )
    loader = BatchLoader(data, batch_size=args.batch_size, collate_fn=collate_documents, shuffle=True, seed=args.seed)
    losses, times = [], []
    gc.collect()
    device = torch.device("cpu")
    training.reset_memory_stats(device)
    for (batch,) in itertools.chain(loader, loader):
        labels = batch.pop("labels")
        loss = loss_fn(model(**batch), labels)
        loss.backward()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
        losses.append(loss.item())
    state = optimizer.state_dict()["state"].values()
    tensors = [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)]
    kept = sum(value.numel() * value.element_size() for value in tensors) / 2**20
    return Curve(name, losses, 1e3 * min(times), kept, training.get_memory_stats(device)["peak_memory_resident"])


def table(curves: list[Curve]) -> str:
    """The curves side by side, and what they cost."""
    reference = curves[0]
    lines = ["step  " + "".join(f"{curve.name:>22}" for curve in curves)]
    for step, exact in enumerate(reference.losses):
        row = f"{step:4d}  {exact:22.4f}"
        for curve in curves[1:]:
            row += f"{curve.losses[step]:12.4f} ({curve.losses[step] / exact - 1:+7.2%})"
        lines.append(row)
    lines.append("")
    for curve in curves:
        worst = max(abs(a / b - 1) for a, b in zip(curve.losses, reference.losses, strict=True))
        lines.append(
            f"{curve.name:20} largest distance {worst:6.2%}   optimizer step {curve.step_ms:6.0f} ms   "
            f"optimizer state {curve.state_mib:6.0f} MiB   peak resident {curve.peak_gib:.2f} GiB"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all four and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="Hugging Face folder of a small model")
    parser.add_argument("--steps", type=int, default=22, help="optimizer steps, an even number")
    parser.add_argument("--batch-size", type=int, default=8, help="conversations per step")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the curves as JSON")
    args = parser.parse_args()

    tokenizer = HuggingFaceModelTokenizer(str(args.checkpoint / "tokenizer.json"))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.jsonl"
        write_conversations(path, args.steps * args.batch_size // 2)
        data = chat_dataset(tokenizer, source=str(path), conversation_column="messages", conversation_style="openai")
    curves = []
    for name, dtype, precision in RUNS:
        curves.append(run(name, dtype, precision, data, args))
        print(f"{name}: {curves[-1].losses[0]:.4f} -> {curves[-1].losses[-1]:.4f}", flush=True)
    print(f"\n{table(curves)}")
    if args.out:
        args.out.write_text(json.dumps([vars(curve) for curve in curves], indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
