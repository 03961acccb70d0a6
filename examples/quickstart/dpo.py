"""Preference training on the quickstart's model: what `make dpo` runs.

Pairs are made of the orders: the right answer is chosen, and one with another value in one field is rejected. The model
that `make quickstart` trains (it is trained first if it is not there) learns from them with DPO; before and after, it
is asked which answer of held-out pairs is likelier, and to write the held-out orders itself.
"""

import json
import random
from pathlib import Path

import torch
from score import HELD_OUT, load
from steps import DATA, OUT, fetch_model, fine_tune, run_recipe, say, score, write_report

from torchtune.data import BatchLoader, collate_preference
from torchtune.datasets import preference_dataset
from torchtune.rlhf import document_log_probs

RUN = OUT / "dpo"
PAIRS = OUT / "pairs"
STEPS = 20


def corrupt(answer: str, others: list[str], rng: random.Random) -> str:
    """An answer that is wrong in one field: it has the value of another order there."""
    right = json.loads(answer)
    field = rng.choice(list(right))
    values = [value for other in others if (value := json.loads(other)[field]) != right[field]]
    return json.dumps({**right, field: rng.choice(values)}, separators=(",", ":"), ensure_ascii=False)


def write_pairs(orders: Path, pairs: Path, seed: int) -> None:
    """Make a preference of every conversation in ``orders``."""
    rng = random.Random(seed)
    conversations = [json.loads(line)["messages"] for line in orders.read_text().splitlines()]
    answers = [messages[-1]["content"] for messages in conversations]
    rows = (
        {"prompt": messages[:-1], "chosen": [messages[-1]], "rejected": [{**messages[-1], "content": wrong}]}
        for messages in conversations
        for wrong in [corrupt(messages[-1]["content"], answers, rng)]
    )
    pairs.parent.mkdir(parents=True, exist_ok=True)
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))


@torch.inference_mode()
def margins(folder: Path, pairs: Path, dtype: str | None = None) -> torch.Tensor:
    """log π(chosen) - log π(rejected) of every pair, float32 ``[n]``, in nats."""
    model, tokenizer = load(folder, dtype)
    data = preference_dataset(tokenizer, source="json", data_files=str(pairs))
    found = []
    for (batch,) in BatchLoader(data, batch_size=8, collate_fn=collate_preference, shuffle=False, seed=0):
        hidden = model(**batch.model_inputs(), output="hidden")
        chosen, rejected = batch.chosen_and_rejected(document_log_probs(hidden, batch, model.output))
        found.append(chosen - rejected)
    return torch.cat(found)


def train(model: Path) -> Path:
    """Run the recipe as a user does."""
    return run_recipe(
        "dpo",
        "smol/135M_lora_dpo_single_device",
        model,
        RUN,
        [
            "dataset._component_=torchtune.datasets.preference_dataset",
            "dataset.source=json",
            f"dataset.data_files={PAIRS / 'train.jsonl'}",
            "dataset_val._component_=torchtune.datasets.preference_dataset",
            "dataset_val.source=json",
            f"dataset_val.data_files={PAIRS / 'held_out.jsonl'}",
            "run_val_every_n_steps=10",
            f"reference_cache={RUN / 'reference'}",  # held-out pairs meet the reference once, not at every validation
            "batch_size=8",
            f"max_steps_per_epoch={STEPS}",
            "loss.beta=0.1",
            "optimizer.lr=2e-4",
            "lr_scheduler.num_warmup_steps=5",
        ],
    )


def main() -> None:
    """Run all steps."""
    fetch_model()
    say("The quickstart's model, fine-tuned on orders\n")
    start = fine_tune(OUT / "run")
    for name, orders, seed in (("train", DATA / "train.jsonl", 1), ("held_out", HELD_OUT, 2)):
        write_pairs(orders, PAIRS / f"{name}.jsonl", seed)
    say("Which answer of 120 held-out pairs is likelier, and what does the model write itself?")
    held_out = PAIRS / "held_out.jsonl"
    margins_before, (answers_before, share_before) = margins(start, held_out), score(start)
    say(f"{share_before:.0%} right. Training it on pairs:\n")
    tuned = train(start)
    say("The same questions to the trained model")
    margins_after, (answers_after, share_after) = margins(tuned, held_out), score(tuned)
    figures = {
        side: {
            "exact_answers": share,
            "accuracy_of_pairs": float((found > 0).float().mean()),
            "margin_of_pairs": float(found.mean()),
        }
        for side, share, found in (
            ("before", share_before, margins_before),
            ("after", share_after, margins_after),
        )
    }
    write_report(OUT / "dpo.json", figures, {"before": answers_before, "after": answers_after})
    say("On held-out orders:")
    for side, found in figures.items():
        print(
            f"  {side:<6}  {found['accuracy_of_pairs']:.1%} of pairs in the right order, margin "
            f"{found['margin_of_pairs']:.1f} nats, {found['exact_answers']:.0%} of the answers exact"
        )
    print(f"""
  model with the adapter merged  {tuned}
  verdict, margins, answers      {RUN / "report.html"}
  every answer                   {OUT / "dpo.json"}
  the pairs                      {PAIRS}
  metrics of every step          {RUN / "logs" / "log.jsonl"}""")


if __name__ == "__main__":
    main()
