"""Twenty steps of the preference recipes are those of TRL's trainers on the same token ids; skipped without TRL.

With an environment of its own: ``pip install --target DIR --no-deps trl==1.16.0 accelerate==1.15.0``, then
``PYTHONPATH=DIR pytest tests/recipes/test_trl.py``.
"""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.runs import Run, start
from tests.tiny import write_pairs
from torchtune.data import Batch, collate_preference

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

FULL, STEPS, BATCH, LR = "full_dpo_single_device", 20, 4, 1e-3
# Of AdamW: with a smaller one, gradients that are rounding errors would move weights as far as any other.
EPS = 1e-5
LOSSES = "torchtune.rlhf.loss"
HEAD = {"_component_": "torchtune.modules.classifier_model", "num_classes": 1}


def run(folder: Path, loss: dict[str, Any], **settings: Any) -> Run:
    """Twenty steps of full fine-tuning in the order of the data, with the optimizer's defaults."""
    write_pairs(folder / "pairs.jsonl", count=STEPS * BATCH)
    optimizer = {"_component_": "torch.optim.AdamW", "lr": LR, "eps": EPS}
    options = {"optimizer": optimizer, "lr_scheduler": None, "shuffle": False, "batch_size": BATCH}
    return start(FULL, folder, loss={**loss, "_component_": f"{LOSSES}.{loss['_component_']}"}, **options | settings)


def parts(row: dict[str, Any], side: str = "") -> tuple[list[int], list[int]]:
    """Prompt and answer of a row of ours, whose labels are shifted."""
    tokens, labels = (
        row[f"{side}_{name}" if side else name] for name in (("input_ids", "labels") if side else ("tokens", "labels"))
    )
    at = [i for i, label in enumerate(labels) if label != -100]
    return tokens[: at[0] + 1], tokens[at[0] + 1 : at[-1] + 2]


def theirs(
    trainer_class: type, config: Any, model: Any, folder: Path, rows: list[dict], ref: Any = None
) -> dict[int, float]:
    """Losses of TRL's trainer on rows of token ids, by step; the model is trained in place."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    text = {"prompt": "a", "chosen": "b", "rejected": "c"}
    if "KTO" in trainer_class.__name__:
        text = {"prompt": "a", "completion": "b", "label": True}
    if "Reward" in trainer_class.__name__:
        text = {"chosen": "a b", "rejected": "a c"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    more = {} if ref is None else {"ref_model": ref}

    class InOrder(trainer_class):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([text] * len(rows)),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        **more,
    )
    trainer.train_dataset = Dataset.from_list(rows)
    trainer.train()
    return {record["step"]: record["loss"] for record in trainer.state.log_history if "loss" in record}


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "logging_first_step": True,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "disable_tqdm": True,
        **more,
    }


def agree(ours: Run, found: dict[int, float], model: torch.nn.Module) -> None:
    """Losses within 1e-4 of each other at every step, weights within 3e-5 at the end.

    AdamW moves a weight by up to 2e-2 in these steps, and magnifies the rounding of a gradient that is almost 0.
    """
    assert len(found) == STEPS
    assert ours.losses == pytest.approx(found, abs=1e-4)
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    (saved,) = ours.output_dir.glob("epoch_*")
    kind = AutoModelForSequenceClassification if hasattr(model, "score") else AutoModelForCausalLM
    state = kind.from_pretrained(saved, dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():  # names of both are those of transformers
        torch.testing.assert_close(state[name], value, atol=3e-5, rtol=0, msg=lambda said, name=name: f"{name}: {said}")


def causal(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "ours", "kind", "more"),
    [
        ("dpo", {"_component_": "DPOLoss", "beta": 0.3}, "sigmoid", {"beta": 0.3}),
        ("ipo", {"_component_": "IPOLoss", "beta": 0.3}, "ipo", {"beta": 0.3}),
        ("hinge", {"_component_": "HingeLoss", "beta": 0.3}, "hinge", {"beta": 0.3}),
        (
            "robust",
            {"_component_": "RobustDPOLoss", "beta": 0.3, "label_smoothing": 0.2},
            "robust",
            {"beta": 0.3, "label_smoothing": 0.2},
        ),
        ("sigmoid-norm", {"_component_": "SigmoidNormLoss", "beta": 1.0}, "sigmoid_norm", {"beta": 1.0}),
    ],
)
def test_pairs_with_a_reference(name, ours, kind, more, tmp_path):
    mine = run(tmp_path, ours)
    data = mine.recipe.loader.dataset
    rows = []
    for index in range(len(data)):
        (prompt, chosen), (_, rejected) = parts(data[index], "chosen"), parts(data[index], "rejected")
        rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    model = causal(tmp_path)
    config = trl.DPOConfig(**options(tmp_path, loss_type=[kind], max_length=None, **more))
    agree(mine, theirs(trl.DPOTrainer, config, model, tmp_path, rows, causal(tmp_path)), model)


# Steps of one pair: TRL's mean of the likelihood term is over the tokens of a batch, ours over its pairs.
ONE_PAIR = {"batch_size": 1, "max_steps_per_epoch": STEPS}
# TRL's likelihood term of ORPO includes the prompt; here all tokens but the first belong to the answers.
ALL_TOKENS = {**ONE_PAIR, "collate_fn": f"{__name__}.collate_all_labelled"}


def all_labelled(row: dict[str, Any]) -> dict[str, Any]:
    """A pair whose tokens all have a label, but the first."""
    return {**row, **{f"{side}_labels": [*row[f"{side}_input_ids"][1:], -100] for side in ("chosen", "rejected")}}


def collate_all_labelled(batch: list[dict[str, Any]]) -> Batch:
    return collate_preference([all_labelled(row) for row in batch])


@pytest.mark.parametrize(
    ("name", "ours", "settings", "more"),
    [
        ("CPO", {"_component_": "SimPOLoss", "beta": 2.0, "gamma": 0.7}, {}, {"loss_type": "simpo", "cpo_alpha": 0.0}),
        ("CPO", {"_component_": "CPOLoss", "beta": 0.3, "alpha": 0.5}, ONE_PAIR, {"cpo_alpha": 0.5}),
        ("ORPO", {"_component_": "ORPOLoss", "beta": 0.3}, ALL_TOKENS, {}),
    ],
    ids=["simpo", "cpo", "orpo"],
)
def test_pairs_without_a_reference(name, ours, settings, more, tmp_path):
    module = importlib.import_module(f"trl.experimental.{name.lower()}")
    mine = run(tmp_path, ours, **settings)
    data, rows = mine.recipe.loader.dataset, []
    for index in range(len(data)):
        row, example = {}, all_labelled(data[index]) if name == "ORPO" else data[index]
        for side in ("chosen", "rejected"):
            prompt, answer = parts(example, side)
            row[f"{side}_input_ids"] = prompt + answer
            row[f"{side}_labels"] = [-100] * len(prompt) + answer
            row[f"{side}_attention_mask"] = [1] * len(prompt + answer)
        rows.append({**row, "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)})
    if name == "ORPO":
        assert {len(row["prompt_input_ids"]) for row in rows} == {1}
    model = causal(tmp_path)
    more = {"beta": ours["beta"], "max_length": 512, **more}
    if "gamma" in ours:
        more["simpo_gamma"] = ours["gamma"]
    if "batch_size" in settings:
        more["per_device_train_batch_size"] = settings["batch_size"]
    config = getattr(module, f"{name}Config")(**options(tmp_path, **more))
    agree(mine, theirs(getattr(module, f"{name}Trainer"), config, model, tmp_path, rows), model)


def test_reward_model(tmp_path):
    from transformers import AutoModelForSequenceClassification

    start(FULL, tmp_path, train=False)
    base = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "checkpoint", num_labels=1, dtype=torch.float32
    )
    base.config.pad_token_id = 0
    base.save_pretrained(tmp_path / "scorer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "scorer" / name).write_bytes((tmp_path / "checkpoint" / name).read_bytes())
    model = {"_component_": "torchtune.models.from_hf_config", "checkpoint_dir": str(tmp_path / "scorer")}
    settings = {"model": model, "checkpointer__checkpoint_dir": str(tmp_path / "scorer")}
    mine = run(tmp_path, {"_component_": "RewardLoss", "center_coefficient": 0.01}, **settings)
    data = mine.recipe.loader.dataset
    rows = [{f"{side}_ids": data[i][f"{side}_input_ids"] for side in ("chosen", "rejected")} for i in range(len(data))]
    config = trl.RewardConfig(
        **options(tmp_path, center_rewards_coefficient=0.01, max_length=None, disable_dropout=True)
    )
    agree(mine, theirs(trl.RewardTrainer, config, base, tmp_path, rows), base)


def test_kto(tmp_path):
    rng = random.Random(0)
    write_pairs(tmp_path / "pairs.jsonl", count=STEPS * BATCH)
    with (tmp_path / "labelled.jsonl").open("w") as file:
        for line in (tmp_path / "pairs.jsonl").read_text().splitlines():
            side = rng.choice(["chosen", "rejected"])
            file.write(json.dumps({"completion": json.loads(line)[side], "label": side == "chosen"}) + "\n")
    dataset = {
        "_component_": "torchtune.datasets.kto_dataset",
        "source": "json",
        "data_files": str(tmp_path / "labelled.jsonl"),
    }
    mine = run(tmp_path, {"_component_": "KTOLoss", "beta": 0.3}, dataset=dataset)
    data = mine.recipe.loader.dataset
    answers = [parts(data[index]) for index in range(len(data))]
    rows = []
    for index, (prompt, answer) in enumerate(answers):
        first = index // BATCH * BATCH
        other = answers[first + (index - first + 1) % BATCH][1]
        longest = max(len(data[at]["tokens"]) for at in range(first, first + BATCH))
        rows.append(
            {
                "prompt_ids": prompt,
                "completion_ids": answer,
                "KL_completion_ids": other[: longest - len(prompt)],
                "label": data[index]["is_chosen"],
            }
        )
    model = causal(tmp_path)
    config = trl.KTOConfig(**options(tmp_path, beta=0.3, max_length=None))
    agree(mine, theirs(trl.KTOTrainer, config, model, tmp_path, rows, causal(tmp_path)), model)
