"""A model that learns to use a tool: what `make agent` runs.

A model of 135 million parameters cannot multiply. Fine-tuned for a few steps on conversations with a calculator, it
sometimes calls it. Then it goes on by itself: it works on a problem eight times, in two turns (a call of the
calculator, and the answer), and conversations that end with the right number become likelier. Before and after, it is
scored on held-out problems.
"""

import json
import os
import random
from pathlib import Path

from calculator import Calculator
from score import load
from steps import HERE, MODEL, OUT, fetch_model, run_recipe, say

from torchtune.datasets import prompt_dataset
from torchtune.rlhf import LocalSampler, collate_prompts
from torchtune.rlhf.environments import Environments, Episode, tools_of

RUN = OUT / "agent"
DATA = OUT / "arithmetic"
TEMPLATE = HERE / "data" / "tools.jinja"
STEPS_BEFORE, STEPS = 4, 20
MAX_NEW_TOKENS = 48


def problem(rng: random.Random) -> str:
    """Return an expression such as 347 * 82 - 1905."""
    text = f"{rng.randrange(100, 1000)} * {rng.randrange(11, 100)}"
    return rng.choice((text, f"{text} {rng.choice('+-')} {rng.randrange(100, 10_000)}"))


def write_data() -> None:
    """Write conversations to fine-tune on, and problems to learn from and to score on."""
    rng = random.Random(0)
    problems = list(dict.fromkeys(problem(rng) for _ in range(600)))
    DATA.mkdir(parents=True, exist_ok=True)
    for name, part in {"shown": problems[:80], "train": problems[80:400], "held_out": problems[400:500]}.items():
        rows = []
        for text in part:
            answer = Calculator().calculate(text)
            user = {"role": "user", "content": f"What is {text}?"}
            row = {"messages": [user], "answer": answer}
            if name == "shown":
                function = {"name": "calculate", "arguments": {"expression": text}}
                call = {"type": "function", "id": "call00000", "function": function}
                row["messages"] += [
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": answer, "tool_call_id": "call00000", "name": "calculate"},
                    {"role": "assistant", "content": answer},
                ]
                row["tools"] = tools_of(Calculator())
            rows.append(row)
        (DATA / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fine_tune() -> Path:
    """Show the model a few conversations."""
    return run_recipe(
        "lora_finetune_single_device",
        "smol/135M_lora_single_device",
        MODEL,
        OUT / "shown",
        [
            f"tokenizer.chat_template={TEMPLATE}",
            "dataset._component_=torchtune.datasets.chat_dataset",
            "dataset.source=json",
            f"dataset.data_files={DATA / 'shown.jsonl'}",
            "dataset.conversation_column=messages",
            "dataset.conversation_style=openai",
            "batch_size=8",
            "epochs=1",
            f"max_steps_per_epoch={STEPS_BEFORE}",
            "optimizer.lr=1e-3",
            "lr_scheduler.num_warmup_steps=2",
        ],
    )


def train(model: Path) -> Path:
    """Run the recipe as a user does."""
    return run_recipe(
        "grpo",
        "smol/135M_lora_grpo_single_device",
        model,
        RUN,
        [
            f"tokenizer.chat_template={TEMPLATE}",
            "dataset.source=json",
            "dataset.name=null",
            f"dataset.data_files={DATA / 'train.jsonl'}",
            "dataset.column=messages",
            "environment._component_=calculator.Calculator",
            "max_turns=2",
            "rewards=[{_component_: torchtune.rlhf.reward_functions.ExactMatch}]",
            f"sampler.max_new_tokens={MAX_NEW_TOKENS}",
            "batch_size=6",
            "num_samples=8",
            "tokens_per_batch=2048",
            f"max_steps_per_epoch={STEPS}",
            "optimizer.lr=1e-3",
            "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "lr_scheduler.num_warmup_steps=2",
        ],
    )


def score(folder: Path, max_turns: int = 2) -> tuple[float, float, list[str]]:
    """Return the share of right answers to held-out problems, the share that calls the tool, and the conversations."""
    model, tokenizer = load(folder, chat_template=str(TEMPLATE))
    data = prompt_dataset(tokenizer, source="json", data_files=str(DATA / "held_out.jsonl"), column="messages")
    prompts = collate_prompts([data[row] for row in range(len(data))]).prompts
    sampler = LocalSampler(model, tokenizer, max_new_tokens=MAX_NEW_TOKENS, max_sequences=50)
    episodes: list[Episode] = Environments(Calculator, sampler, tokenizer, max_turns=max_turns)(prompts, 1)
    last = [tokenizer.decode(one.last_turn).strip() for one in episodes]
    right = sum(text == prompt.row["answer"] for text, prompt in zip(last, prompts, strict=True))
    texts = [tokenizer.decode(one.answer, skip_special_tokens=False) for one in episodes]
    return right / len(prompts), sum(one.calls > 0 for one in episodes) / len(prompts), texts


def main() -> None:
    """Run all steps."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    fetch_model()
    write_data()
    say("Scoring the model as it was published on 100 held-out problems")
    alone, _, _ = score(MODEL)
    say(f"{alone:.0%} right. Showing it {8 * STEPS_BEFORE} conversations with a calculator:\n")
    start = fine_tune()
    before, called_before, _ = score(start)
    say(f"{before:.0%} right, {called_before:.0%} call the calculator. Now it learns from its own conversations:\n")
    tuned = train(start)
    say("Scoring it on the same problems")
    after, called_after, texts = score(tuned)
    figures = {
        "exact_match": {"published": alone, "shown": before, "trained": after},
        "tool_use": {"shown": called_before, "trained": called_after},
        "conversations": texts,
    }
    (OUT / "agent.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"\n{texts[0]}")
    say(
        f"Right answers: {alone:.0%} as published, {before:.0%} before, {after:.0%} after; calls of the calculator: "
        f"{called_before:.0%} before, {called_after:.0%} after."
    )
    print(f"""
  model with the adapter merged  {tuned}
  verdict, rewards, answers      {RUN / "report.html"}
  every held-out conversation    {OUT / "agent.json"}
  what was sampled, and scored   {RUN / "rollouts.jsonl"}
  metrics of every step          {RUN / "logs" / "log.jsonl"}""")


if __name__ == "__main__":
    main()
