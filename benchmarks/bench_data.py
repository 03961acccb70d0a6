"""Compare the preparation of chats with TRL's: seconds to tokenize and pack, and peak memory of each side.

    python benchmarks/bench_data.py --tokenizer FOLDER            # 20 MB of chats
    python benchmarks/bench_data.py --tokenizer FOLDER --megabytes 100 --processes 2
    python benchmarks/bench_data.py --tokenizer FOLDER --data chats.jsonl
    python benchmarks/bench_data.py --tokenizer FOLDER --steps 1000 # what a step of one pack takes of training
    python benchmarks/bench_data.py --tokenizer FOLDER --alpaca 2000 # rows with an instruction and an answer

FOLDER is a Hugging Face checkpoint with a chat template. Chats are made of sentences of the standard library's
documentation. Each run is a process of its own that has imported everything before the clock starts; sides alternate.
TRL reads, tokenizes and packs (best-fit decreasing) with the trainer's own method; with its default of a loss on all
tokens, as its assistant-only loss needs a template with marks. This library finds what the assistant says, checks
every row, and leaves mapped files. Memory is the largest resident set of the main process and of its children.

With --steps there is no peer: a step of one pack is loaded from mapped data, from a stream that a process of its own
reads ahead, and from a stream that is tokenized by the process that trains, which does nothing for 8 ms in between.
With --alpaca, rows are tokenized whose prompt ends in a line break, as the templates of Alpaca write it; run it in
pairs with another revision.
"""

import argparse
import importlib
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LENGTH = 2048


def documentation_sentences() -> list[str]:
    """Sentences of the standard library's documentation."""
    texts = [p.read_text("utf-8", "replace") for p in sorted(Path(os.__file__).parent.glob("**/*.py"))[:1500]]
    documentation = " ".join(
        " ".join(found.split()) for text in texts for found in re.findall(r'"""(.*?)"""', text, re.S)
    )
    return [s for s in re.split(r"(?<=[.!?])\s", documentation) if 20 < len(s) < 400]


def write_chats(path: Path, size: int) -> None:
    """Chats of one to three exchanges, about 900 bytes each."""
    sentences = documentation_sentences()
    draw = random.Random(0)
    with path.open("w") as file:
        while file.tell() < size:
            turns = [{"role": "system", "content": draw.choice(sentences)}] if draw.random() < 0.3 else []
            for _ in range(draw.randint(1, 3)):
                turns.append({"role": "user", "content": " ".join(draw.choices(sentences, k=draw.randint(1, 3)))})
                turns.append({"role": "assistant", "content": " ".join(draw.choices(sentences, k=draw.randint(1, 4)))})
            file.write(json.dumps({"messages": turns}) + "\n")


def open_chats(data: str, tokenizer: str, **how: Any) -> Any:
    """Packs of chats, as this library makes them."""
    from torchtune.datasets import chat_dataset
    from torchtune.tokenizers import hf_tokenizer

    return chat_dataset(
        hf_tokenizer(tokenizer, max_seq_len=LENGTH),
        source=data,
        conversation_column="messages",
        conversation_style="openai",
        packed=True,
        **how,
    )


def prepare_with_torchtune(data: str, tokenizer: str, processes: int) -> int:
    """Packs that this library makes."""
    from torchtune.datasets._processes import workers

    with workers(processes):
        return len(open_chats(data, tokenizer))


def prepare_with_trl(data: str, tokenizer: str, processes: int) -> int:
    """Packs that TRL makes."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    processing = AutoTokenizer.from_pretrained(tokenizer)
    arguments = SFTConfig(
        output_dir=os.environ["HF_DATASETS_CACHE"],
        max_length=LENGTH,
        packing=True,
        report_to=[],
        use_cpu=True,
        dataset_num_proc=processes if processes > 1 else None,
    )
    # What the method reads of a trainer: the model has no part in it.
    trainer = SimpleNamespace(
        _tokenizer=processing, _is_vlm=False, args=arguments, chat_template=None, completion_only_loss=False
    )
    rows = load_dataset("json", data_files=data, split="train")
    return len(SFTTrainer._prepare_dataset(trainer, rows, processing, arguments, True, None, "train"))


SIDES = {"torchtune": prepare_with_torchtune, "trl": prepare_with_trl}
IMPORTED = {
    "torchtune": ["torchtune.datasets._sft", "torchtune.tokenizers._hf_tokenizer"],
    "trl": ["trl.trainer.sft_trainer"],
}


def run_side(side: str, data: str, tokenizer: str, processes: int) -> None:
    """Prepare in this process and print what it took."""
    for name in IMPORTED[side]:
        importlib.import_module(name)
    import datasets

    datasets.disable_progress_bars()
    start, before = time.perf_counter(), _cpu_seconds()
    packs = SIDES[side](data, tokenizer, processes)
    seconds = time.perf_counter() - start
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = _cpu_seconds() - before
    print(json.dumps({"seconds": seconds, "cpu": cpu, "packs": packs, "own_mib": peaks[0], "child_mib": peaks[1]}))


def _cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage)


def measure(side: str, data: Path, tokenizer: str, processes: int) -> dict[str, float]:
    """Run one side in a process of its own, with caches of its own."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"HF_DATASETS_CACHE": folder, "TORCHTUNE_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--side", side, "--data", str(data), "--tokenizer", tokenizer]
        done = subprocess.run(
            [*command, "--processes", str(processes)],
            env=os.environ | caches | {"TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def measure_steps(data: str, tokenizer: str, steps: int) -> None:
    """Print milliseconds of CPU time of the process that trains, for each step."""
    from torchtune.data import BatchLoader, collate_documents
    from torchtune.datasets._processes import workers

    kinds = {"mapped": (None, False), "stream, read ahead": (2, True), "stream": (1, True)}
    for kind, (processes, streaming) in kinds.items():
        with workers(processes):
            dataset = open_chats(data, tokenizer, **({"streaming": True} if streaming else {}))
            how = {"shuffle": True, "seed": 0, "collate_fn": collate_documents}
            loader = BatchLoader(dataset, batch_size=1, max_steps_per_epoch=steps + 1, **how)
        took = []
        found = iter(loader)
        while not loader.at_epoch_end:
            time.sleep(0.008)
            start = time.thread_time()
            next(found)
            took.append(1e3 * (time.thread_time() - start))
        print(f"{kind:<20} {statistics.mean(took[1:]):.2f} ms a step of {LENGTH:,} tokens, at most {max(took[1:]):.1f}")


def measure_alpaca(tokenizer: str, count: int) -> None:
    """Print the CPU time in which one process turns rows in Alpaca format into tokens and labels."""
    from torchtune.data import AlpacaToMessages
    from torchtune.datasets import SFTTransform
    from torchtune.tokenizers import hf_tokenizer

    sentences = documentation_sentences()
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        text = draw.choice(sentences) if draw.random() < 0.4 else ""
        answer = " ".join(draw.choices(sentences, k=draw.randint(1, 4)))
        rows.append({"instruction": draw.choice(sentences), "input": text, "output": answer})
    messages = AlpacaToMessages(masking_strategy="train_on_all")
    transform = SFTTransform(messages, hf_tokenizer(tokenizer, max_seq_len=LENGTH))
    transform(rows[0])  # imports and compiled templates
    start = time.process_time()
    for row in rows:
        transform(row)
    milliseconds = 1e3 * (time.process_time() - start) / count
    print(f"{count:,} rows of Alpaca: CPU {milliseconds:.2f} ms a row")


def main() -> None:
    """Measure both sides in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="folder of a checkpoint")
    parser.add_argument("--data", type=Path, help="chats to use, as JSON lines with a column messages")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, help="load so many packs instead")
    parser.add_argument("--alpaca", type=int, help="tokenize so many rows in Alpaca format instead")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args.side, str(args.data), args.tokenizer, args.processes)
        return
    if args.alpaca:
        measure_alpaca(args.tokenizer, args.alpaca)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or Path(folder) / "chats.jsonl"
        if args.data is None:
            write_chats(data, int(args.megabytes * 1e6))
        if args.steps:
            measure_steps(str(data), args.tokenizer, args.steps)
            return
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(args.repeats):
            for side in SIDES:
                found[side].append(measure(side, data, args.tokenizer, args.processes))
        print(f"{data.stat().st_size / 1e6:.1f} MB of chats, {args.processes} processes, {args.repeats} runs each")
        for side, runs in found.items():
            seconds, cpu, own, child = (
                statistics.median(run[key] for run in runs) for key in ("seconds", "cpu", "own_mib", "child_mib")
            )
            memory = f"{own:,.0f} MiB, children {child:,.0f} MiB"
            print(f"{side:<10} {seconds:7.2f} s, CPU {cpu:7.2f} s   {runs[0]['packs']:,} packs   {memory}")
        ratios = [trl["cpu"] / ours["cpu"] for ours, trl in zip(*found.values(), strict=True)]
        print(f"TRL takes {statistics.median(ratios):.2f} times the CPU time ({min(ratios):.2f} to {max(ratios):.2f})")
        ratios = [trl["seconds"] / ours["seconds"] for ours, trl in zip(*found.values(), strict=True)]
        print(f"TRL takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
