"""Steps of the preference recipes, and of GRPO, are those of TRL's trainers on the same token ids; skipped without TRL.

With an environment of its own: ``pip install --target DIR --no-deps trl==1.16.0 accelerate==1.15.0``, then
``PYTHONPATH=DIR pytest tests/recipes/test_trl.py``.
"""

import importlib
import random

import pytest
import torch

from tests.recipes.runs import start
from tests.tiny import read_lines, write_checkpoint, write_conversations, write_lines, write_pairs
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.data import collate_preference
from torchtune.models import from_hf_config
from torchtune.rlhf import GroupAdvantages, Rollout, collate_rollouts
from torchtune.rlhf.loss import GRPOLoss, setup_loss

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

FULL = "full_dpo_single_device"
STEPS = 20
BATCH = 4
LR = 1e-3
# Of AdamW: with a smaller one, gradients that are rounding errors would move weights as far as any other.
EPS = 1e-5
LOSSES = "torchtune.rlhf.loss"
HEAD = {"_component_": "torchtune.modules.classifier_model", "num_classes": 1}


def run(folder, loss, **settings):
    """Twenty steps of full fine-tuning in the order of the data, with the optimizer's defaults."""
    write_pairs(folder / "pairs.jsonl", count=STEPS * BATCH)
    optimizer = {"_component_": "torch.optim.AdamW", "lr": LR, "eps": EPS}
    options = {"optimizer": optimizer, "lr_scheduler": None, "shuffle": False, "batch_size": BATCH}
    return start(FULL, folder, loss={**loss, "_component_": f"{LOSSES}.{loss['_component_']}"}, **options | settings)


def parts(row, side=""):
    """Prompt and answer of a row of this library, whose labels are shifted."""
    if side:
        tokens = row[f"{side}_input_ids"]
        labels = row[f"{side}_labels"]
    else:
        tokens = row["tokens"]
        labels = row["labels"]
    labeled = [i for i, label in enumerate(labels) if label != -100]
    start = labeled[0] + 1
    end = labeled[-1] + 2
    return tokens[:start], tokens[start:end]


def train_with_trl(trainer_class, config, model, folder, rows, ref=None):
    """Losses of TRL's trainer on rows of token ids, by step; the model is trained in place."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    text = {"prompt": "a", "chosen": "b", "rejected": "c"}
    if "KTO" in trainer_class.__name__:
        text = {"prompt": "a", "completion": "b", "label": True}
    if "SFT" in trainer_class.__name__:
        text = {"prompt": "a", "completion": "b"}
    if "Reward" in trainer_class.__name__:
        text = {"chosen": "a b", "rejected": "a c"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    reference = {}
    if ref is not None:
        reference["ref_model"] = ref

    class InOrder(trainer_class):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([text] * len(rows)),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        **reference,
    )
    trainer.train_dataset = Dataset.from_list(rows)
    trainer.train()
    return {record["step"]: record["loss"] for record in trainer.state.log_history if "loss" in record}


def options(folder, **more):
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


def agree(run_of_recipe, losses_of_trl, model):
    """Losses within 1e-4 of each other at every step, weights within 3e-5 at the end.

    AdamW moves a weight by up to 2e-2 in these steps, and magnifies the rounding of a gradient that is almost 0.
    """
    assert len(losses_of_trl) == STEPS
    assert run_of_recipe.losses == pytest.approx(losses_of_trl, abs=1e-4)
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    (saved,) = run_of_recipe.output_dir.glob("epoch_*")
    kind = AutoModelForCausalLM
    if hasattr(model, "score"):
        kind = AutoModelForSequenceClassification
    state = kind.from_pretrained(saved, dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():  # names of both are those of transformers
        torch.testing.assert_close(state[name], value, atol=3e-5, rtol=0, msg=lambda said, name=name: f"{name}: {said}")


def causal(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)


# Steps of one pair: TRL's mean of the likelihood term is over the tokens of a batch, ours over its pairs.
ONE_PAIR = {"batch_size": 1, "max_steps_per_epoch": STEPS}


@pytest.mark.parametrize(
    ("kind", "component", "settings"),
    [
        ("sigmoid", "DPOLoss", {"beta": 0.3}),
        ("ipo", "IPOLoss", {"beta": 0.3}),
        ("hinge", "HingeLoss", {"beta": 0.3}),
        ("robust", "RobustDPOLoss", {"beta": 0.3, "label_smoothing": 0.2}),
        ("sigmoid_norm", "SigmoidNormLoss", {"beta": 1.0}),
        ("apo_zero", "APOZeroLoss", {"beta": 0.3}),
        ("apo_down", "APODownLoss", {"beta": 0.3}),
        ("bco_pair", "BCOPairLoss", {"beta": 0.3}),
    ],
)
def test_pairs_with_a_reference(kind, component, settings, tmp_path):
    compare_pairs(tmp_path, run(tmp_path, {"_component_": component, **settings}), loss_type=[kind], **settings)


MIXTURE = [
    {"_component_": f"{LOSSES}.DPOLoss", "beta": 0.3},
    {"_component_": f"{LOSSES}.BCOPairLoss", "beta": 0.3},
    {"_component_": f"{LOSSES}.ChosenNLLLoss"},
]


@pytest.mark.parametrize(
    ("loss", "kinds", "weights"),
    [
        (
            {"_component_": "MixedPreferenceLoss", "losses": MIXTURE, "loss_weights": [0.8, 0.2, 1.0]},
            ["sigmoid", "bco_pair", "sft"],
            [0.8, 0.2, 1.0],
        ),
        ({"_component_": "DPOLoss", "beta": 0.3, "rpo_alpha": 0.5}, ["sigmoid", "sft"], [1.0, 0.5]),
    ],
    ids=["mpo", "rpo"],
)
def test_weighted_losses_of_pairs(loss, kinds, weights, tmp_path):
    compare_pairs(tmp_path, run(tmp_path, loss, **ONE_PAIR), loss_type=kinds, loss_weights=weights, beta=0.3)


def compare_pairs(tmp_path, run_of_recipe, **settings):
    """Compare a run with TRL's DPOTrainer on the same pairs."""
    data = run_of_recipe.recipe.loader.dataset
    rows = []
    for index in range(len(data)):
        prompt, chosen = parts(data[index], "chosen")
        _, rejected = parts(data[index], "rejected")
        rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    model = causal(tmp_path)
    batch_size = run_of_recipe.recipe.cfg.batch_size
    config = trl.DPOConfig(
        **options(tmp_path, max_length=None, **settings) | {"per_device_train_batch_size": batch_size}
    )
    agree(run_of_recipe, train_with_trl(trl.DPOTrainer, config, model, tmp_path, rows, causal(tmp_path)), model)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ({"reweighting": "dft"}, {"loss_type": "dft"}),
        ({"label_smoothing": 0.1}, {"loss_type": "nll", "label_smoothing_factor": 0.1}),
    ],
)
def test_losses_of_supervised_fine_tuning(loss, settings, tmp_path):
    conversations = write_conversations(tmp_path / "conversations.jsonl", count=STEPS * BATCH)
    optimizer = {"_component_": "torch.optim.AdamW", "lr": LR, "eps": EPS}
    run_of_recipe = start(
        "full_finetune_single_device",
        tmp_path,
        loss={"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss", **loss},
        optimizer=optimizer,
        lr_scheduler=None,
        shuffle=False,
        batch_size=BATCH,
        gradient_accumulation_steps=1,
        dataset__data_files=str(conversations),
    )
    data = run_of_recipe.recipe.loader.dataset
    rows = []
    for index in range(len(data)):
        labels = data[index]["labels"]
        rows.append({"input_ids": data[index]["tokens"], "labels": [-100, *labels[:-1]]})  # TRL shifts them itself
    model = causal(tmp_path)
    config = trl.SFTConfig(**options(tmp_path, max_length=None, packing=False, **settings))
    agree(run_of_recipe, train_with_trl(trl.SFTTrainer, config, model, tmp_path, rows), model)


# TRL's likelihood term of ORPO includes the prompt; here all tokens but the first belong to the answers.
ALL_TOKENS = {**ONE_PAIR, "collate_fn": f"{__name__}.collate_all_labelled"}


def all_labelled(row):
    """A pair whose tokens all have a label, but the first."""
    labels = {}
    for side in ("chosen", "rejected"):
        labels[f"{side}_labels"] = [*row[f"{side}_input_ids"][1:], -100]
    return {**row, **labels}


def collate_all_labelled(batch):
    return collate_preference([all_labelled(row) for row in batch])


@pytest.mark.parametrize(
    ("name", "ours", "settings", "trl_settings"),
    [
        ("CPO", {"_component_": "SimPOLoss", "beta": 2.0, "gamma": 0.7}, {}, {"loss_type": "simpo", "cpo_alpha": 0.0}),
        ("CPO", {"_component_": "CPOLoss", "beta": 0.3, "alpha": 0.5}, ONE_PAIR, {"cpo_alpha": 0.5}),
        ("ORPO", {"_component_": "ORPOLoss", "beta": 0.3}, ALL_TOKENS, {}),
    ],
    ids=["simpo", "cpo", "orpo"],
)
def test_pairs_without_a_reference(name, ours, settings, trl_settings, tmp_path):
    module = importlib.import_module(f"trl.experimental.{name.lower()}")
    run_of_recipe = run(tmp_path, ours, **settings)
    data = run_of_recipe.recipe.loader.dataset
    rows = []
    for index in range(len(data)):
        row = {}
        example = all_labelled(data[index]) if name == "ORPO" else data[index]
        for side in ("chosen", "rejected"):
            prompt, answer = parts(example, side)
            row[f"{side}_input_ids"] = prompt + answer
            row[f"{side}_labels"] = [-100] * len(prompt) + answer
            row[f"{side}_attention_mask"] = [1] * len(prompt + answer)
        rows.append({**row, "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)})
    if name == "ORPO":
        assert {len(row["prompt_input_ids"]) for row in rows} == {1}
    model = causal(tmp_path)
    trl_settings = {"beta": ours["beta"], "max_length": 512, **trl_settings}
    if "gamma" in ours:
        trl_settings["simpo_gamma"] = ours["gamma"]
    if "batch_size" in settings:
        trl_settings["per_device_train_batch_size"] = settings["batch_size"]
    config = getattr(module, f"{name}Config")(**options(tmp_path, **trl_settings))
    agree(run_of_recipe, train_with_trl(getattr(module, f"{name}Trainer"), config, model, tmp_path, rows), model)


def test_reward_model_trains_as_in_trl(tmp_path):
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
    run_of_recipe = run(tmp_path, {"_component_": "RewardLoss", "center_coefficient": 0.01}, **settings)
    data = run_of_recipe.recipe.loader.dataset
    rows = []
    for index in range(len(data)):
        pair = data[index]
        rows.append({"chosen_ids": pair["chosen_input_ids"], "rejected_ids": pair["rejected_input_ids"]})
    config = trl.RewardConfig(
        **options(tmp_path, center_rewards_coefficient=0.01, max_length=None, disable_dropout=True)
    )
    agree(run_of_recipe, train_with_trl(trl.RewardTrainer, config, base, tmp_path, rows), base)


def test_kto_trains_as_in_trl(tmp_path):
    rng = random.Random(0)
    write_pairs(tmp_path / "pairs.jsonl", count=STEPS * BATCH)
    labelled = []
    for pair in read_lines(tmp_path / "pairs.jsonl"):
        side = rng.choice(["chosen", "rejected"])
        labelled.append({"completion": pair[side], "label": side == "chosen"})
    source = str(write_lines(tmp_path / "labelled.jsonl", labelled))
    dataset = {"_component_": "torchtune.datasets.kto_dataset", "source": source}
    run_of_recipe = run(tmp_path, {"_component_": "KTOLoss", "beta": 0.3}, dataset=dataset)
    data = run_of_recipe.recipe.loader.dataset
    answers = [parts(data[index]) for index in range(len(data))]
    rows = []
    for index, (prompt, answer) in enumerate(answers):
        # Each prompt with the next answer of its batch, no longer than the longest row of the batch.
        first = index // BATCH * BATCH
        _, mismatched = answers[first + (index - first + 1) % BATCH]
        longest = max(len(data[i]["tokens"]) for i in range(first, first + BATCH))
        rows.append(
            {
                "prompt_ids": prompt,
                "completion_ids": answer,
                "KL_completion_ids": mismatched[: longest - len(prompt)],
                "label": data[index]["is_chosen"],
            }
        )
    model = causal(tmp_path)
    config = trl.KTOConfig(**options(tmp_path, beta=0.3, max_length=None))
    agree(run_of_recipe, train_with_trl(trl.KTOTrainer, config, model, tmp_path, rows, causal(tmp_path)), model)


@pytest.mark.parametrize("has_replies", [False, True])
def test_answers_of_a_policy(has_replies, tmp_path):
    """Two updates on each of three steps of fixed answers, with and without tokens that were not sampled."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    write_checkpoint(tmp_path / "checkpoint")
    rng = random.Random(0)
    size = 4

    def tokens(longest):
        return [rng.randrange(20, 90) for _ in range(rng.randrange(3, longest))]

    prompts = [[tokens(8), tokens(8)] for _ in range(3)]
    steps = []  # (prompt, answer) of each step
    masks = []  # which tokens of an answer were sampled
    for prompts_of_step in prompts:
        answers = []
        for prompt in prompts_of_step:
            answers += [(prompt, tokens(12)) for _ in range(size)]
        steps.append(answers)
        masks_of_step = []
        for _, answer in answers:
            masks_of_step.append([not has_replies or i % 3 != 1 for i in range(len(answer))])
        masks.append(masks_of_step)

    def score(completion_ids, **_):
        return [sum(answer) % 7 / 7 for answer in completion_ids]

    def rollout(prompts, trainer):
        number = trainer.state.global_step // 2
        prompt_ids, completion_ids = zip(*steps[number], strict=True)
        generated = {"prompt_ids": list(prompt_ids), "completion_ids": list(completion_ids), "logprobs": None}
        if has_replies:
            generated["env_mask"] = [list(map(int, mask)) for mask in masks[number]]
        return generated

    reference = causal(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, eps=EPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    settings = {"num_generations": size, "num_iterations": 2, "beta": 0.0, "epsilon_high": 0.28, "loss_type": "dapo"}
    settings |= {
        "scale_rewards": "none",
        "per_device_train_batch_size": 2 * size,
        "max_steps": 6,
        "shuffle_dataset": False,
    }
    trainer = trl.GRPOTrainer(
        model=reference,
        reward_funcs=score,
        args=trl.GRPOConfig(**options(tmp_path, **settings)),
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(6)]),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        rollout_func=rollout,
    )
    trainer.train()
    expected = [record["loss"] for record in trainer.state.log_history if "loss" in record]

    with torch.device("meta"):
        model = from_hf_config(str(tmp_path / "checkpoint"))
    FullModelHFCheckpointer(str(tmp_path / "checkpoint")).load_model(model, device=torch.device("cpu"))
    loss_fn = setup_loss(GRPOLoss(), model)
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    for step, step_masks in zip(steps, masks, strict=True):
        rewards = torch.tensor(score([answer for _, answer in step]), dtype=torch.float64)
        advantages = GroupAdvantages()(rewards.view(-1, size)).flatten().tolist()
        rollouts = [
            Rollout(torch.tensor(prompt + answer), len(prompt), None, True, torch.tensor(mask))
            for (prompt, answer), mask in zip(step, step_masks, strict=True)
        ]
        batch = collate_rollouts(rollouts, advantages)
        for _ in range(2):
            scores = loss_fn.score(model(**batch.model_inputs(), output="hidden"), batch, model.output)
            total, _ = loss_fn.sum_and_metrics(batch, scores)
            loss = total / batch.num_terms
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, losses)) > 1e-2
    text = torch.tensor([tokens(40)])
    with torch.no_grad():
        logits = model(text)
        wanted = reference(text).logits
    torch.testing.assert_close(logits.log_softmax(-1), wanted.log_softmax(-1), atol=1e-4, rtol=0)
