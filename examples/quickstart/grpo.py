"""Reinforcement learning with rewards that are computed: what `make grpo` runs.

A model that is fine-tuned on orders half-way, until it is right sometimes, goes on by itself: it answers an order
eight times, every answer gets the share of its fields that are right (and one point more if it is right letter for
letter), and the better ones become likelier. Before and after, it is scored on held-out orders.
"""

from pathlib import Path

from score import HELD_OUT, MAX_NEW_TOKENS
from steps import DATA, OUT, fetch_model, fine_tune, run_recipe, say, score, write_report

HALFWAY = OUT / "halfway"
RUN = OUT / "grpo"
STEPS_BEFORE = 12  # of fine-tuning; 66 are an epoch
STEPS = 40
REWARDS = ("JSONFields", "ExactMatch")


def train(model: Path) -> Path:
    """Run the recipe as a user does."""
    rewards = ", ".join(f"{{_component_: torchtune.rlhf.reward_functions.{name}}}" for name in REWARDS)
    return run_recipe(
        "grpo",
        "smol/135M_lora_grpo_single_device",
        model,
        RUN,
        [
            "dataset.source=json",
            "dataset.name=null",
            f"dataset.data_files={DATA / 'train.jsonl'}",
            "dataset.column=messages",
            "dataset_val._component_=torchtune.datasets.prompt_dataset",
            "dataset_val.source=json",
            f"dataset_val.data_files={HELD_OUT}",
            "dataset_val.column=messages",
            "run_val_every_n_steps=10",
            "batch_size_val=120",
            f"rewards=[{rewards}]",
            f"sampler.max_new_tokens={MAX_NEW_TOKENS}",
            "batch_size=8",
            "num_samples=8",
            "tokens_per_batch=2048",
            f"max_steps_per_epoch={STEPS}",
            "optimizer.lr=1e-3",
            "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "lr_scheduler.num_warmup_steps=2",
        ],
    )


def main() -> None:
    """Run all steps."""
    fetch_model()
    say(f"Fine-tuning it half-way, for {STEPS_BEFORE} steps:\n")
    start = fine_tune(HALFWAY, f"max_steps_per_epoch={STEPS_BEFORE}")
    say("Scoring it on 120 held-out orders")
    before, share_before = score(start)
    say(f"{share_before:.0%} right. Now it learns from rewards of its own answers:\n")
    tuned = train(start)
    say("Scoring it on the same orders")
    after, share_after = score(tuned)
    figures = {"share_before": share_before, "share_after": share_after}
    write_report(OUT / "grpo.json", figures, {"before": before, "after": after})
    say(f"Exact answers: {share_before:.0%} before, {share_after:.0%} after.")
    print(f"""
  model with the adapter merged  {tuned}
  verdict, rewards, answers      {RUN / "report.html"}
  every answer                   {OUT / "grpo.json"}
  what was sampled, and scored   {RUN / "rollouts.jsonl"}
  metrics of every step          {RUN / "logs" / "log.jsonl"}""")


if __name__ == "__main__":
    main()
