"""Compare this library with TRL's trainers on a CPU: label tokens per CPU-second, peak memory, losses.

    python benchmarks/compare_trl.py                      # SmolLM2-135M's shape, random weights
    python benchmarks/compare_trl.py --checkpoint FOLDER  # a Hugging Face folder of a Llama

Both sides train the same examples in the same order with the same labels, plain AdamW at the same constant rate,
without clipping and without recomputing activations. Each run is a process of its own; sides alternate, so that a
drift of the machine hits both. CPU time and memory are the operating system's account of the process: the time of
the steps after the first two, and the peak of the resident set (VmHWM), in all and above what was resident when
everything had been imported and nothing loaded.

Methods: "lora" and "qlora" (rank 16 on every linear layer; the base of qlora in NF4 with double quantization, TRL's by
bitsandbytes, which computes it on a CPU too), "full", and "full8": full with 8-bit states and the optimizer in the
backward pass here, TRL's own full fine-tuning there.

Work: chats of about 230 tokens, up to 512, half of them labeled. "rows" are batches of 4 examples (TRL pads them),
"packed" are 4 rows of up to 512 tokens (TRL's best-fit decreasing; without flash attention its documents see each
other, which costs no time). TRL keeps its default loss. "pairs" (DPO), "scores" (reward models) and "rollouts" (GRPO)
are explained in compare_trl_answers.py.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

CASES = [(method, "bf16", layout) for method in ("lora", "qlora", "full", "full8") for layout in ("rows", "packed")]
CASES += [("lora", "fp32", "rows"), ("full", "fp32", "rows")]
CASES += [("lora", "bf16", "pairs"), ("full", "bf16", "pairs"), ("lora", "fp32", "pairs")]
CASES += [("full", "bf16", "scores"), ("full", "fp32", "scores")]
CASES += [("lora", dtype, layout) for layout in ("rollouts", "updates") for dtype in ("bf16", "fp32")]
LR = {"lora": 1e-4, "qlora": 1e-4, "full": 2e-5, "full8": 2e-5}


def draw_tokens(checkpoint: Path, count: int) -> list[int]:
    """Tokens of the standard library's source for a checkpoint that has learned a language, else random ones."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    if tokenizer.get_vocab_size() < 1000:
        zipf = np.random.default_rng(1).zipf(1.2, count) + 20
        return np.minimum(zipf, vocab_size - 1).tolist()
    tokens: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        tokens += tokenizer.encode(path.read_text("utf-8", errors="replace")).ids
        if len(tokens) >= count:
            return tokens[:count]
    raise SystemExit(f"The standard library has only {len(tokens)} tokens: ask for fewer steps.")


def make_examples(count: int, checkpoint: Path, seed: int = 0) -> list[dict[str, list[int]]]:
    """Chats as token ids: one to three turns, about half of the tokens answers. ``mask`` is 1 where labeled."""
    import numpy as np

    rng = np.random.default_rng(seed)
    source = draw_tokens(checkpoint, 512 * count)
    examples = []
    for _ in range(count):
        length = int(np.clip(rng.lognormal(5.3, 0.5), 32, 512))
        turns = int(rng.integers(1, 4))
        cuts = np.sort(rng.choice(np.arange(4, length - 4), 2 * turns - 1, replace=False))
        bounds = [0, *cuts.tolist(), length]
        mask = [0] * length
        for turn in range(turns):
            start, stop = bounds[2 * turn + 1], bounds[2 * turn + 2]
            mask[start:stop] = [1] * (stop - start)
        tokens, source = source[:length], source[length:]
        examples.append({"input_ids": tokens, "mask": mask})
    return examples


def make_checkpoint(folder: Path) -> Path:
    """Random weights of SmolLM2-135M's shape, with a tokenizer that nothing uses."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


def resident(field: str) -> float:
    """Resident memory of this process, MiB: ``VmRSS`` now, ``VmHWM`` at most so far."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


class Meter:
    """CPU seconds of the steps after the warm-up."""

    WARMUP = 2  # steps

    def __init__(self) -> None:
        self.steps = 0
        self.cpu = self.wall = 0.0

    @staticmethod
    def _now() -> tuple[float, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime, time.perf_counter()

    def start(self) -> None:
        """A step begins."""
        self._mark = self._now()

    def stop(self) -> None:
        """A step ends."""
        self.steps += 1
        if self.is_warm:
            cpu, wall = self._now()
            self.cpu += cpu - self._mark[0]
            self.wall += wall - self._mark[1]

    @property
    def is_warm(self) -> bool:
        """Whether the step that ended last counts."""
        return self.steps > self.WARMUP

    def figures(self, losses: list[float], labelled: int, imported: float) -> dict[str, Any]:
        """What a run reports: memory in MiB."""
        peak = resident("VmHWM")
        return {
            "losses": losses, "labelled": labelled, "cpu": self.cpu, "wall": self.wall,
            "peak": peak, "above": peak - imported,
        }  # fmt: skip


def run_ours(method: str, dtype: str, layout: str, checkpoint: Path, examples: list, steps: int) -> dict[str, Any]:
    """The loop of our recipes, with its components."""
    import torch
    from torchao.optim import AdamW8bit

    from torchtune import checkpoints, training
    from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, BatchLoader, collate_documents
    from torchtune.datasets import PackedDataset
    from torchtune.models import from_hf_config
    from torchtune.modules.conversion import Conversion, apply_conversions
    from torchtune.modules.loss import LinearCrossEntropyLoss
    from torchtune.modules.low_precision import QuantizeBase
    from torchtune.modules.peft import LoRA

    imported = resident("VmRSS")
    dataset: Any = [
        {
            "tokens": example["input_ids"],
            "labels": [
                token if on else CROSS_ENTROPY_IGNORE_IDX
                for token, on in zip(example["input_ids"][1:], example["mask"][1:], strict=True)
            ]
            + [CROSS_ENTROPY_IGNORE_IDX],
        }
        for example in examples
    ]
    if layout == "packed":
        dataset = PackedDataset(dataset, max_seq_len=512)
    loader = BatchLoader(dataset, batch_size=4, collate_fn=collate_documents, shuffle=False, seed=0)
    with training.set_default_dtype(training.get_dtype(dtype)), torch.device("meta"):
        model = from_hf_config(checkpoint)
        conversions: list[Conversion] = [QuantizeBase("nf4")] if method == "qlora" else []
        if method in ("lora", "qlora"):
            conversions.append(LoRA(rank=16, alpha=32, apply_to_mlp=True))
        apply_conversions(model, conversions)
    torch.manual_seed(0)
    checkpoints.FullModelHFCheckpointer(str(checkpoint)).load_model(model)
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    if method == "full8":
        factory: Any = partial(AdamW8bit, lr=LR[method], weight_decay=0.0)
        optimizer = training.setup_optimizer(factory, model, in_backward=True)
    else:
        factory = partial(torch.optim.AdamW, lr=LR[method], weight_decay=0.0, fused=True)
        optimizer = training.setup_optimizer(factory, model, precision="param_dtype")
    meter, losses, labelled = Meter(), [], 0
    for (batch,) in loader:
        meter.start()
        labels = batch.pop("labels")
        loss = loss_fn(model(**batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        meter.stop()
        labelled += int((labels != CROSS_ENTROPY_IGNORE_IDX).sum()) if meter.is_warm else 0
        if meter.steps == steps:
            break
    return meter.figures(losses, labelled, imported)


def run_trl(method: str, dtype: str, layout: str, checkpoint: Path, examples: list, steps: int) -> dict[str, Any]:
    """TRL's SFTTrainer on the same tokens."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    imported = resident("VmRSS")
    torch.manual_seed(0)
    precision = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    quantized = None
    if method == "qlora":
        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=precision,
        )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=precision, quantization_config=quantized)
    rows = {
        "input_ids": [example["input_ids"] for example in examples],
        "completion_mask": [example["mask"] for example in examples],
    }
    meter, labelled, counted = Meter(), 0, []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.stop()

    class Trainer(SFTTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            counted.append(int((inputs["labels"][:, 1:] != -100).sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    with tempfile.TemporaryDirectory() as output_dir:
        settings = SFTConfig(
            output_dir=output_dir,
            per_device_train_batch_size=4,
            max_steps=steps,
            max_length=512,
            packing=layout == "packed",
            completion_only_loss=True,
            learning_rate=LR[method],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            optim="adamw_torch_fused",
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        lora = None
        if method in ("lora", "qlora"):
            lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[Clock()],
        )
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(precision)
        trainer.train()
    labelled = sum(counted[Meter.WARMUP :])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return meter.figures(losses, labelled, imported)


def child(arguments: argparse.Namespace) -> None:
    """One run in this process; prints its figures as JSON."""
    import compare_trl_answers
    import torch

    torch.set_num_threads(arguments.threads)
    examples = json.loads((Path(arguments.work) / "examples.json").read_text())
    method, dtype, layout = arguments.case.split(",")
    if layout in compare_trl_answers.LAYOUTS:
        answers = compare_trl_answers
        answers.PROMPT = arguments.prompt
        runs = {"ours": answers.run_ours, "apart": partial(answers.run_ours, share=False), "trl": answers.run_trl}
    else:
        runs = {"ours": run_ours, "trl": run_trl}
    run = runs[arguments.side]
    figures = run(method, dtype, layout, Path(arguments.checkpoint), examples, arguments.steps)
    print("RESULT " + json.dumps(figures))


def measure(side: str, case: tuple[str, ...], arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--case", ",".join(case), "--work", str(work)]
    command += ["--checkpoint", str(arguments.checkpoint), "--steps", str(arguments.steps)]
    command += ["--threads", str(arguments.threads), "--prompt", str(arguments.prompt)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{side} {case} failed:\n{done.stderr[-3000:]}")


def report(case: tuple[str, ...], ours: list[dict], trl: list[dict]) -> None:
    """A line of ratios: medians over the pairs of runs."""
    for run in (*ours, *trl):
        run["rate"] = run["labelled"] / run["cpu"]

    def ratio(name: str) -> float:
        return statistics.median(one[name] / other[name] for one, other in zip(ours, trl, strict=True))

    def median(runs: list[dict], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    pairs = zip(ours[0]["losses"], trl[0]["losses"], strict=False)
    comparable = case[-1] in ("rows", "pairs", "scores", "updates")
    apart = max(abs(a - b) for a, b in pairs) if comparable else float("nan")
    columns = [f"{' '.join(case):<18} {ratio('rate'):>7.2f}x {median(ours, 'rate'):>8.0f} {median(trl, 'rate'):>8.0f}"]
    for name in ("peak", "above"):
        columns.append(f"{ratio(name):>8.2f}x {median(ours, name):>7.0f} {median(trl, name):>7.0f}")
    print(*columns, f"{apart:>9.4f}", flush=True)


def main() -> None:
    """Parse, run pairs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="Hugging Face folder of a Llama; random weights by default")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs per case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--against", default="trl", choices=["trl", "apart"], help="what is compared with")
    parser.add_argument("--prompt", type=float, default=0.5, help="share of a prompt in pairs and updates")
    parser.add_argument("--only", help="cases to run, for example lora-bf16-rows,full-fp32-rows")
    for hidden in ("--side", "--case", "--work"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        child(arguments)
        return
    cases = CASES
    if arguments.against == "trl":  # which has no update without rollouts
        cases = [case for case in CASES if case[-1] != "updates"]
    wanted = [case for case in cases if not arguments.only or "-".join(case) in arguments.only.split(",")]
    if not wanted:
        parser.error(f"--only: choose from {', '.join('-'.join(case) for case in cases)}.")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        arguments.checkpoint = arguments.checkpoint or make_checkpoint(work / "checkpoint")
        examples = make_examples(16 * arguments.steps, Path(arguments.checkpoint))
        (work / "examples.json").write_text(json.dumps(examples))
        sides = f"{'ours':>7} {arguments.against:>7}"
        print(f"{'case':<18} {'speed':>8}  {sides}  {'peak':>8} {sides} {'- import':>9} {sides} max|dloss|")
        print(f"{'':<18} {'':>8} {'label tokens/CPU-s':>17} {'':>9} {'MiB':>15} {'':>9} {'MiB':>15}")
        for case in wanted:
            ours, trl = [], []
            for _ in range(arguments.rounds):
                ours.append(measure("ours", case, arguments, work))
                trl.append(measure(arguments.against, case, arguments, work))
            report(case, ours, trl)


if __name__ == "__main__":
    main()
