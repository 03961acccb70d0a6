"""Compare two revisions of this repository: CPU seconds, wall seconds and peak memory of commands that users run.

    python benchmarks/compare_revisions.py v1.0 HEAD --checkpoint_dir /tmp/SmolLM2-135M-Instruct
    python benchmarks/compare_revisions.py v1.0 HEAD --checkpoint_dir FOLDER --cases sft_lora dpo --rounds 5

Each command is a process of its own, the revisions take turns, and a ratio (new / old) is that of the medians. Runs of
recipes also print seconds per 1,000 tokens of a step, from the second step on, which the time before and after training
does not change.
Revisions are checked out into a temporary folder; packages are those of the running interpreter.
"""

import argparse
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATA = Path(__file__).parents[1] / "examples" / "quickstart" / "data"
CHAT = [
    "dataset._component_=torchtune.datasets.chat_dataset",
    "dataset.source=json",
    f"dataset.data_files={DATA / 'train.jsonl'}",
    "dataset.conversation_column=messages",
    "dataset.conversation_style=openai",
]
TRAINING = [
    *("device=cpu", "enable_activation_checkpointing=False", "gradient_accumulation_steps=1", "seed=1"),
    *("metric_logger.output_fmt=jsonl", "batch_size=8"),
]


def chat_run(config: str, steps: int, dtype: str) -> list[str]:
    """Arguments of ``tune`` for a supervised run of the chats of the quickstart."""
    return ["run", "--config", f"smol/{config}", *CHAT, *TRAINING, f"max_steps_per_epoch={steps}", f"dtype={dtype}"]


def cases(folder: Path) -> dict[str, list[str]]:
    """Arguments of ``tune`` by case; every run reads its model from ``{model}`` and writes to ``{out}``."""
    pairs = [
        "dataset._component_=torchtune.datasets.preference_dataset",
        *("dataset.source=json", f"dataset.data_files={folder / 'pairs.jsonl'}", "max_steps_per_epoch=4"),
    ]
    prompts = [
        *("dataset.source=json", "dataset.name=null", f"dataset.data_files={DATA / 'train.jsonl'}"),
        *("dataset.column=messages", "rewards=[{_component_: torchtune.rlhf.reward_functions.JSONFields}]"),
        *("num_samples=8", "sampler.max_new_tokens=48", "max_steps_per_epoch=3", "batch_size=2"),
    ]
    return {
        "start": ["run", *chat_run("135M_lora_single_device", 1, "fp32")[1:], "--dry-run"],
        "estimate": ["estimate", "--config", "llama3_1/8B_full", "--simulate", "8xH100"],
        "prepare": ["data", "prepare", "smol/135M_lora_single_device", "--output", "{out}/rows", *CHAT],
        "sft_lora": chat_run("135M_lora_single_device", 10, "fp32"),
        "sft_lora_bf16": chat_run("135M_lora_single_device", 10, "bf16"),
        "sft_full": chat_run("135M_full_single_device", 6, "fp32"),
        "dpo": ["run", "--config", "smol/135M_lora_dpo_single_device", *TRAINING, *pairs, "dtype=fp32"],
        "grpo": ["run", "--config", "smol/135M_lora_grpo_single_device", *TRAINING, *prompts, "dtype=fp32"],
        "generate": [
            *("run", "generate", "--config", "smol/135M_generation", "device=cpu", "dtype=fp32", "temperature=0"),
            *("max_new_tokens=200", "prompt.user=Tell a long story about a lighthouse."),
        ],
    }


def write_pairs(path: Path) -> None:
    """Preferences: the right answer of an order against that of the next one."""
    chats = [json.loads(line)["messages"] for line in (DATA / "train.jsonl").read_text().splitlines()]
    rows = (
        {"prompt": chat[:-1], "chosen": [chat[-1]], "rejected": [other[-1]]}
        for chat, other in itertools.pairwise(chats)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(tree: Path, arguments: list[str], model: str, out: Path) -> dict[str, float]:
    """Run one command in a process of its own; its figures."""
    filled = [argument.format(out=out) if "{out}" in argument else argument for argument in arguments]
    if arguments[0] in {"run", "data"}:
        filled += [f"checkpointer.checkpoint_dir={model}", f"tokenizer.path={model}"]
        if "generate" not in arguments and arguments[0] == "run":
            filled += [f"output_dir={out}"]
    settings = {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "",
        "TORCHTUNE_CACHE": str(out / "cache"),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, "-c", "from torchtune._cli.tune import main; main()", *filled]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **settings}, cwd=tree, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{tree.name}: tune {' '.join(filled)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    figures = {"cpu s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "wall s": wall}
    if seconds := seconds_per_1000_tokens(out):
        figures["s / 1k"] = seconds
    return figures


def seconds_per_1000_tokens(out: Path) -> float | None:
    """Median over the logged steps but the first, or None without a log."""
    speeds = []
    for path in (out / "logs").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        speeds += [row["tokens_per_second_per_gpu"] for row in rows if row.get("tokens_per_second_per_gpu")][1:]
    return 1000 / statistics.median(speeds) if speeds else None


def main() -> None:
    """Print a line for each case and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--cases", nargs="+", default=list(cases(Path())), choices=cases(Path()))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model, root = str(Path(args.checkpoint_dir).resolve()), Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_pairs(folder / "pairs.jsonl")
        trees = {}
        for name, revision in (("old", args.old), ("new", args.new)):
            trees[name] = folder / re.sub(r"\W", "_", f"{name}_{revision}")
            subprocess.run(["git", "-C", root, "worktree", "add", "-q", "--detach", trees[name], revision], check=True)
        try:
            compare(trees, {name: cases(folder)[name] for name in args.cases}, model, args.rounds)
        finally:
            for tree in trees.values():
                subprocess.run(["git", "-C", root, "worktree", "remove", "--force", tree], check=True)


def compare(trees: dict[str, Path], commands: dict[str, list[str]], model: str, rounds: int) -> None:
    """Run each command in both trees by turns."""
    for case, arguments in commands.items():
        figures: dict[str, dict[str, list[float]]] = {}
        for _ in range(rounds):
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory() as out:
                    for figure, value in run(tree, arguments, model, Path(out)).items():
                        figures.setdefault(figure, {}).setdefault(name, []).append(value)
        for figure, sides in figures.items():
            if len(sides) < len(trees):  # a revision may log other figures
                continue
            old, new = (statistics.median(sides[name]) for name in ("old", "new"))
            print(f"{case:14} {figure:7} old {old:8.2f}  new {new:8.2f}  new / old {new / old:5.2f}", flush=True)


if __name__ == "__main__":
    main()
