"""Preferences, reward models and GRPO for compare_trl.py, which says what is compared and how.

"pairs" are steps of DPO on four pairs, with the reference computed in each; "scores" the same pairs for a reward model;
"rollouts" a step of GRPO: eight answers of 128 tokens to one prompt are sampled, scored and trained on; "updates" is
such a step on answers that are given, of which TRL has no part. Answers are what counts as labeled tokens.
"""

import tempfile
from pathlib import Path
from typing import Any

from compare_trl import LR, Meter, resident

LAYOUTS = ("pairs", "scores", "rollouts", "updates")
BATCH, SAMPLES, NEW = 4, 8, 128
PROMPT = 0.5  # share of the prompt in a prompt and answer
Pair = tuple[list[int], list[int], list[int]]


def make_pairs(examples: list) -> list[Pair]:
    """Prompt, chosen and rejected answer: the parts of an example, and the second part of the one after it."""
    return [
        (one[: int(len(one) * PROMPT)], one[int(len(one) * PROMPT) :], other[int(len(other) * PROMPT) :])
        for one, other in zip(*[iter(example["input_ids"] for example in examples)] * 2, strict=False)
    ]


def make_prompts(examples: list) -> list[list[int]]:
    """The first tokens of every example, as many as there are in half of it, at most 128."""
    return [example["input_ids"][: min(128, len(example["input_ids"]) // 2)] for example in examples]


def score_of(tokens: list[int]) -> float:
    """A reward that differs between answers."""
    return (sum(tokens) % 1000) / 1000


def run_ours(
    method: str, dtype: str, layout: str, checkpoint: Path, examples: list, steps: int, share: bool = True
) -> dict[str, Any]:
    """The loop of our recipes, with its components."""
    import torch

    from torchtune import checkpoints, rlhf, training
    from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, BatchLoader, collate_preference, share_prefixes
    from torchtune.models import from_hf_config
    from torchtune.modules import classifier_model
    from torchtune.modules.conversion import apply_conversions
    from torchtune.modules.peft import LoRA
    from torchtune.rlhf.loss import DPOLoss, GRPOLoss, RewardLoss, setup_loss

    imported = resident("VmRSS")
    dims = training.ParallelDims()
    with training.set_default_dtype(training.get_dtype(dtype)), torch.device("meta"):
        if layout == "scores":
            model = classifier_model(1, "torchtune.models.from_hf_config", checkpoint_dir=str(checkpoint))
        else:
            model = from_hf_config(checkpoint)
        if method == "lora":
            apply_conversions(model, [LoRA(rank=16, alpha=32, apply_to_mlp=True)])
    torch.manual_seed(0)
    checkpoints.FullModelHFCheckpointer(str(checkpoint)).load_model(model)
    if layout == "scores":
        fill_head(model.output.weight)

    losses_of = {"pairs": DPOLoss, "scores": lambda: RewardLoss(center_coefficient=0.0)}
    loss_fn = losses_of.get(layout, GRPOLoss)()
    setup_loss(loss_fn, model)
    reference = rlhf.Reference(loss_fn, model, dims)
    optimizer = training.setup_optimizer(
        lambda params: torch.optim.AdamW(params, lr=LR[method], weight_decay=0.0, fused=True),
        model,
        precision="param_dtype",
    )

    def document(prompt: list[int], answer: list[int], side: str) -> dict[str, list[int]]:
        ignored = [CROSS_ENTROPY_IGNORE_IDX]
        return {f"{side}_input_ids": prompt + answer, f"{side}_labels": ignored * (len(prompt) - 1) + answer + ignored}

    def rollouts() -> Any:
        vocab_size = model.tok_embeddings.weight.shape[0]
        sampler = rlhf.LocalSampler(model, None, max_new_tokens=NEW, stop_tokens=[vocab_size - 1])
        prompts = make_prompts(examples) if layout == "rollouts" else [[5] * int(NEW * PROMPT / (1 - PROMPT))] * steps
        for number, tokens in enumerate(prompts):
            meter.start()
            if layout == "rollouts":
                found = sampler([tokens], SAMPLES, [number])
            else:
                answers = torch.randint(20, vocab_size, (SAMPLES, NEW), generator=torch.Generator().manual_seed(number))
                whole = [torch.cat([torch.tensor(tokens), answer]) for answer in answers]
                found = [rlhf.Rollout(one, len(tokens), None, True) for one in whole]
            rewards = torch.tensor([[score_of(one.answer) for one in found]], dtype=torch.float64)
            prompts = [rlhf.Prompt(tokens, {}, number)]
            scored = rlhf.ScoredRollouts(prompts, found, [""] * SAMPLES, rewards, {})
            limits = {"tokens_per_batch": 8192, "share_prefix": share}
            yield scored.batches(rlhf.GroupAdvantages()(rewards, dims), loss_fn, dims, **limits)

    def collate(rows: list[dict[str, list[int]]]) -> Batch:
        batch = collate_preference(rows)
        return share_prefixes(batch, batch.per_document["pair"].tolist(), labelled=True) if share else batch

    def pairs() -> Any:
        data = [document(p, c, "chosen") | document(p, r, "rejected") for p, c, r in make_pairs(examples)]
        for batches in BatchLoader(data, batch_size=BATCH, collate_fn=collate, shuffle=False, seed=0):
            meter.start()
            yield batches, sum(batch.num_terms for batch in batches), sum(map(num_answers, batches))

    def num_answers(batch: Batch) -> int:
        return int(batch.per_document["label_counts"].sum())

    meter, losses, labelled = Meter(), [], 0
    model.train()
    for batches, num_terms, num_labels in (pairs if layout in losses_of else rollouts)():
        total = 0.0
        for batch in batches:
            log_probs, _ = reference(batch)
            hidden = model(**batch.model_inputs(), output="hidden")
            scores = loss_fn.score(hidden, batch, model.output)
            loss = loss_fn.sum_and_metrics(batch, scores, log_probs)[0] / num_terms
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        meter.stop()
        labelled += num_labels if meter.is_warm else 0
        if meter.steps == steps:
            break
    return meter.figures(losses, labelled, imported)


def fill_head(weight: Any) -> None:
    """Give the output of a reward model the same values on both sides."""
    import torch

    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 0.02
    weight.data.copy_(values)


def run_trl(method: str, dtype: str, layout: str, checkpoint: Path, examples: list, steps: int) -> dict[str, Any]:
    """TRL's trainers on the same tokens."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )

    trainers = {
        "pairs": (trl.DPOTrainer, trl.DPOConfig, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        "scores": (trl.RewardTrainer, trl.RewardConfig, {"chosen": "a b", "rejected": "a c"}),
        "rollouts": (trl.GRPOTrainer, trl.GRPOConfig, {"prompt": "a"}),
    }
    trainer_class, config_class, text = trainers[layout]
    imported = resident("VmRSS")
    torch.manual_seed(0)
    precision = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if layout == "scores":
        kind: Any = AutoModelForSequenceClassification
        model = kind.from_pretrained(checkpoint, dtype=precision, num_labels=1)
        model.config.pad_token_id = tokenizer.pad_token_id
        fill_head(model.score.weight)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=precision)
    prompts, pairs = make_prompts(examples), make_pairs(examples)
    rows = {
        "pairs": [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs],
        "scores": [{"chosen_ids": p + c, "rejected_ids": p + r} for p, c, r in pairs],
        "rollouts": [{"prompt": str(number)} for number in range(len(prompts))],
    }[layout]
    meter = Meter()

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.stop()

    class InOrder(trainer_class):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            if layout == "rollouts":  # repeats every prompt for its answers
                self.shuffle_dataset = False
                return super()._get_train_sampler(*args, **kwargs)
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def _tokenize_prompts(self, numbers: list[str]) -> Any:
            return [list(prompts[int(number)]) for number in numbers], None, {}

    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "max_steps": steps,
        "learning_rate": LR[method],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "optim": "adamw_torch_fused",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
        "disable_tqdm": True,
    }
    more: dict[str, Any] = {}
    if layout == "rollouts":
        settings |= {
            "per_device_train_batch_size": SAMPLES,
            "num_generations": SAMPLES,
            "max_completion_length": NEW,
            "generation_kwargs": {"min_new_tokens": NEW},
        }
        more["reward_funcs"] = lambda completion_ids, **_: [score_of(one) for one in completion_ids]
    else:
        settings["max_length"] = None
    if method == "lora":
        more["peft_config"] = LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        )
    elif layout == "pairs":
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=precision)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = InOrder(
            model=model,
            args=config_class(output_dir=output_dir, **settings),
            train_dataset=Dataset.from_list([text] * len(rows)),
            processing_class=tokenizer,
            callbacks=[Clock()],
            **more,
        )
        trainer.train_dataset = Dataset.from_list(rows)
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(precision)
        trainer.train()
    used = range(Meter.WARMUP, meter.steps)
    if layout == "rollouts":
        labelled = len(used) * SAMPLES * NEW
    else:
        labelled = sum(len(c) + len(r) for step in used for _, c, r in pairs[step * BATCH : (step + 1) * BATCH])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return meter.figures(losses, labelled, imported)
