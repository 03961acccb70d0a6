"""An embedding model of the quickstart's orders: what `make embed` runs.

A query is the sentence of an order, and the passage that answers it is the JSON of this order. SmolLM2 learns to give
both similar vectors; before and after, every held-out sentence looks for its JSON among those of all held-out orders.
"""

import json
from pathlib import Path

from score import HELD_OUT, load
from steps import DATA, MODEL, OUT, fetch_model, run_recipe, say

from torchtune.evaluation import EmbeddingSettings, evaluate_retrieval, read_retrieval

RUN = OUT / "embed"
ROWS = OUT / "retrieval"
STEPS = 20


def write_rows(orders: Path, rows: Path) -> None:
    """Make a query with its positive of every conversation in ``orders``."""
    lines = []
    for line in orders.read_text().splitlines():
        text_of = {message["role"]: message["content"] for message in json.loads(line)["messages"]}
        lines.append(json.dumps({"query": text_of["user"], "positive": text_of["assistant"]}) + "\n")
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(lines))


def train() -> Path:
    """Run the recipe as a user does."""
    return run_recipe(
        "dpo",
        "smol/135M_lora_dpo_single_device",
        MODEL,
        RUN,
        [
            "dataset._component_=torchtune.datasets.embedding_dataset",
            "dataset.source=json",
            f"dataset.data_files={ROWS / 'train.jsonl'}",
            "collate_fn=torchtune.data.collate_embedding",
            "loss._component_=torchtune.rlhf.loss.InfoNCELoss",
            "loss.pooling=mean",
            "~loss.beta",
            "batch_size=16",
            f"max_steps_per_epoch={STEPS}",
            "optimizer.lr=1e-3",
            "lr_scheduler.num_warmup_steps=2",
        ],
    )


def scores(folder: Path) -> dict[str, float]:
    """What the model in ``folder`` retrieves of the held-out orders."""
    data = read_retrieval(ROWS / "held_out.jsonl")
    return evaluate_retrieval(*load(folder), data, settings=EmbeddingSettings(pooling="mean"))


def main() -> None:
    """Run all steps."""
    fetch_model()
    write_rows(DATA / "train.jsonl", ROWS / "train.jsonl")
    write_rows(HELD_OUT, ROWS / "held_out.jsonl")
    say("What does the published model find?")
    before = scores(MODEL)
    say(f"{before['recall@1']:.0%} of the held-out sentences find their order first. Training it:\n")
    tuned = train()
    say("The same of the trained model")
    after = scores(tuned)
    (OUT / "embed.json").write_text(json.dumps({"before": before, "after": after}, indent=2) + "\n")
    for side, figures in (("before", before), ("after", after)):
        print(f"  {side:<6}  " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    print(f"""
  the embedding model            {tuned}
  metrics of every step          {RUN / "logs" / "log.jsonl"}""")


if __name__ == "__main__":
    main()
