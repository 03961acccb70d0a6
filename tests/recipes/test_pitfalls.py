"""Pitfalls of preference training and rewards, put in one by one; each breaks the promise that it should.

How bugs are put in and caught: ``test_injected_bugs.py``. Runs are set up once for the file, and trained where a bug
shows in a step alone.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtune.data
from tests.recipes.checks import promise
from tests.recipes.runs import Run, start
from tests.recipes.test_injected_bugs import Bug, caught, injected
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, Documents
from torchtune.rlhf import GroupAdvantages, _reference
from torchtune.rlhf.loss import DPOLoss, GRPOLoss, _base, reward

FULL, LORA, GRPO = "full_dpo_single_device", "lora_dpo_single_device", "full_grpo_single_device"
SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.5}, "lr_scheduler": None, "shuffle": False}
LOSS = "self.compute_loss(batch) / num_terms"


class Runs:
    """Runs on one tiny model, set up on demand, once each; ``pad`` is the end of a turn, as many tokenizers have it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._known = folder, {}

    def __call__(self, name: str, **settings: Any) -> Any:
        """The recipe, set up and not trained."""
        key = repr((name, settings))
        if key not in self._known:
            self._known[key] = start(name, self.folder, train=False, **settings).recipe
        return self._known[key]

    def rollouts(self, changes: dict[str, str] | None = None, **settings: Any) -> Run:
        """One step of GRPO on six prompts with three answers each."""
        options = {**SGD, "max_steps_per_epoch": 1, "num_samples": 3, "batch_size": 6, **settings}
        return start(GRPO, self.folder, changes=changes, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("pitfalls")
    turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "the cat"}]
    pairs = [("the dog sees a cat", "where"), ("a bird", "one two three and not a dog"), ("red", "small blue dog")]
    with (folder / "pairs.jsonl").open("w") as file:
        for chosen, rejected in pairs:
            question = [*turns, {"role": "user", "content": "who likes the bird"}]
            sides = {"chosen": chosen, "rejected": rejected}
            row = {side: [*question, {"role": "assistant", "content": text}] for side, text in sides.items()}
            file.write(json.dumps(row) + "\n")
    return Runs(folder)


def a_batch(recipe: Any, rows: slice = slice(None)) -> Batch:
    """Pairs of a recipe's data, collated as the recipe does it now."""
    examples = [recipe.loader.dataset[index] for index in range(len(recipe.loader.dataset))]
    return torchtune.data.collate_preference(examples[rows])


def answers_have_their_ends(runs: Runs) -> None:
    """Every turn of the assistant ends with a label, although its end is the id of padding."""
    recipe = runs(FULL)
    batch, stop = a_batch(recipe), recipe.tokenizer.stop_tokens[0]
    ends = batch.sum_per_document(batch.labels == stop)
    promise(ends.tolist() == [2] * 6, "each of the two turns of an answer has its end among the labels")


def answers_score_as_transformers_does(runs: Runs) -> None:
    """Labels are what comes next in the row, each once, its end included."""
    from transformers import AutoModelForCausalLM

    recipe = runs(FULL)
    batch, theirs = a_batch(recipe), AutoModelForCausalLM.from_pretrained(runs.folder / "checkpoint")
    rows = [
        (row[f"{side}_input_ids"], row[f"{side}_labels"])
        for side in ("chosen", "rejected")
        for row in (recipe.loader.dataset[index] for index in range(3))
    ]
    with torch.no_grad():
        hidden = recipe.model(**batch.model_inputs(), output="hidden")
        found = recipe.loss_fn.score(hidden, batch, recipe.model.output)
        for (tokens, labels), score in zip(rows, found, strict=True):
            log_probs = theirs(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
            known = [at for at, label in enumerate(labels) if label != CROSS_ENTROPY_IGNORE_IDX]
            wanted = sum(log_probs[at, tokens[at + 1]] for at in known)
            promise(abs(score - wanted) < 1e-4, "an answer scores the sum of the log-probs of what comes next in it")


def dpo_compares_sums(runs: Runs) -> None:
    """The margin of answers of different lengths, to a reference that says 0 of everything."""
    recipe = runs(FULL)
    batch, scores = a_batch(recipe), torch.tensor([-4.0, -2.0, -6.0, -1.0, -9.0, -3.0], dtype=torch.float64)
    total, _ = recipe.loss_fn.sum_and_metrics(batch, scores, torch.zeros_like(scores))
    margins = 0.1 * (scores[:3] - scores[3:])
    promise(abs(total + margins.sigmoid().log().sum()) < 1e-9, "the margin of DPO is a difference of sums")


def trained_adapter(runs: Runs) -> Any:
    """A recipe whose adapters, with dropout, change what the model says before its first step."""
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.5}
    recipe = runs(LORA, model_converters=[lora])
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in recipe.model.named_parameters():
            if "lora_b" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return recipe


def the_reference_is_evaluated(runs: Runs) -> None:
    recipe = trained_adapter(runs)
    reference = _reference.Reference(recipe.loss_fn, recipe.model.train(), recipe.dims)
    batch = a_batch(recipe)
    one, other = (reference(batch).log_probs for _ in range(2))
    promise(torch.equal(one, other), "the reference says the same of a batch twice, without dropout")


def the_reference_is_the_start(runs: Runs) -> None:
    recipe = trained_adapter(runs)
    reference = _reference.Reference(recipe.loss_fn, recipe.model, recipe.dims)
    batch = a_batch(recipe)
    with torch.no_grad():
        hidden = recipe.model.eval()(**batch.model_inputs(), output="hidden")
        now = recipe.loss_fn.score(hidden, batch, recipe.model.output)
    promise(torch.equal(reference(batch).log_probs, now), "the reference is the adapter that the run starts with")


def micro_batches_change_nothing(runs: Runs, changes: dict[str, str] | None = None) -> None:
    norms = [runs.rollouts(changes, **more).records[0]["grad_norm"] for more in ({}, {"tokens_per_batch": 70})]
    promise(norms[0] > 0, "a step has a gradient")
    promise(abs(norms[0] / norms[1] - 1) < 1e-4, "the gradient of a step does not depend on its micro-batches")


def advantages_are_centred(runs: Runs) -> None:
    run = runs.rollouts()
    found = [json.loads(line)["advantage"] for line in (run.output_dir / "rollouts.jsonl").read_text().splitlines()]
    promise(any(found), "some answers are better than others")
    promise(all(abs(sum(found[i : i + 3])) < 1e-5 for i in range(0, 18, 3)), "advantages of a group add up to 0")


def scores_are_those_of_answers_alone(runs: Runs) -> None:
    """Of a padded batch, in which the padding is a token that answers have, too."""
    head = {"_component_": "torchtune.modules.classifier_model", "num_classes": 1}
    base = {"base_model_path": "torchtune.models.from_hf_config", "checkpoint_dir": str(runs.folder / "checkpoint")}
    loss = {"_component_": "torchtune.rlhf.loss.RewardLoss"}
    recipe = runs(FULL, loss=loss, model={**head, **base})

    def scores(batch: Batch) -> torch.Tensor:
        return recipe.loss_fn.score(
            recipe.model(**batch.model_inputs(), output="hidden"), batch, recipe.model.output
        ).detach()

    together = scores(a_batch(recipe).pad_to_multiple(64))
    alone = [scores(a_batch(recipe, slice(i, i + 1))) for i in range(3)]
    wanted = torch.stack(alone, dim=1).flatten()
    promise(bool(wanted.std() > 0.01), "answers have different scores")
    promise(torch.allclose(together, wanted, atol=1e-5), "a score is that of the answer's last token, not of padding")


def kl_pulls_to_the_reference(runs: Runs) -> None:
    """In expectation over the policy's tokens, the term has the gradient of KL(policy‖reference)."""
    rng = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(6, generator=rng, dtype=torch.float64) for _ in range(2))
    log_p, ref = logits.requires_grad_().log_softmax(0), other.log_softmax(0)
    zeros, first = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    (wanted,) = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)
    for kl in ("k3", "k1"):
        terms, _ = GRPOLoss(9.0, 9.0, kl_coeff=1.0, kl=kl)(log_p, log_p.detach(), zeros, first, ref)
        (found,) = torch.autograd.grad((log_p.detach().exp() * terms).sum(), logits, retain_graph=True)
        promise(torch.allclose(found, wanted, atol=1e-9), "the KL term has the gradient of the divergence")


def shifted_again(log_probs: Bug, hidden: Any, labels: torch.Tensor, *rest: Any) -> torch.Tensor:
    return log_probs(hidden, torch.cat([labels[:, 1:], labels.new_full((1, 1), -100)], 1), *rest)


def labels_masked_by_padding(collate: Bug, examples: list) -> Batch:
    batch = collate(examples)
    return dataclasses.replace(batch, labels=batch.labels.masked_fill(batch.labels == 2, -100))


def end_left_out(log_probs: Bug, hidden: Any, batch: Batch, *rest: Any) -> torch.Tensor:
    labels, ends = batch.labels.clone(), batch.documents.cu_seqlens[1:].long() - 1
    for first, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
        last = (labels[0, first : end + 1] != CROSS_ENTROPY_IGNORE_IDX).nonzero()[-1]
        labels[0, first + last] = CROSS_ENTROPY_IGNORE_IDX
    return log_probs(hidden, dataclasses.replace(batch, labels=labels), *rest)


def means(compare: Bug, self: DPOLoss, policy: Any, reference: Any) -> Any:
    self.by_token = True
    try:
        return compare(self, policy, reference)
    finally:
        del self.by_token


@contextmanager
def left_in_training(evaluating: Bug, model: torch.nn.Module) -> Iterator[None]:
    yield


def mean_added_back(advantages: Bug, self: GroupAdvantages, rewards: torch.Tensor, *rest: Any) -> torch.Tensor:
    return advantages(self, rewards, *rest) + rewards.nanmean()


def at_a_pad(pooled: Bug, hidden: Any, batch: Batch, projection: Any) -> torch.Tensor:
    if batch.num_padding_documents:
        *lengths, last, padding = batch.documents.lengths
        documents = Documents.from_lengths([*lengths, last + padding])
        batch = dataclasses.replace(batch, documents=documents, num_padding_documents=0)
    return pooled(hidden, batch, projection)


def sign_flipped(forward: Bug, self: GRPOLoss, log_probs: Any, old: Any, advantages: Any, of: Any, ref: Any) -> Any:
    self.kl_coeff = -self.kl_coeff
    return forward(self, log_probs, old, advantages, of, ref)


# What carries the bug, the bug, the check, the promise that it breaks.
PITFALLS: dict[str, tuple[Any, str, Bug, Callable[[Runs], None], str]] = {
    "labels shifted twice": (
        _base,
        "token_log_probs",
        shifted_again,
        answers_score_as_transformers_does,
        "an answer scores the sum",
    ),
    "mask from the id of padding": (
        torchtune.data,
        "collate_preference",
        labels_masked_by_padding,
        answers_have_their_ends,
        "each of the two turns of an answer has its end",
    ),
    "end token missing in the log-prob": (
        _base,
        "document_log_probs",
        end_left_out,
        answers_score_as_transformers_does,
        "an answer scores the sum",
    ),
    "mean instead of sum": (DPOLoss, "compare", means, dpo_compares_sums, "the margin of DPO is a difference of sums"),
    "dropout left on": (
        _reference,
        "_evaluating",
        left_in_training,
        the_reference_is_evaluated,
        "the same of a batch twice, without dropout",
    ),
    "base as reference of a trained adapter": (
        _reference,
        "_changes_nothing",
        lambda *_: True,
        the_reference_is_the_start,
        "the reference is the adapter that the run starts with",
    ),
    "mean of the advantages added back": (
        GroupAdvantages,
        "__call__",
        mean_added_back,
        advantages_are_centred,
        "advantages of a group add up to 0",
    ),
    "reward pooled at a pad": (
        reward,
        "pooled_scores",
        at_a_pad,
        scores_are_those_of_answers_alone,
        "a score is that of the answer's last token",
    ),
    "sign of the KL flipped": (
        GRPOLoss,
        "forward",
        sign_flipped,
        kl_pulls_to_the_reference,
        "the KL term has the gradient of the divergence",
    ),
}


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_pitfalls_are_caught(pitfall: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, bug, check, sentence = PITFALLS[pitfall]
    check(runs)
    with injected(monkeypatch, owner, name, bug), caught(sentence):
        check(runs)


def test_a_mean_per_micro_batch_is_caught(runs: Runs) -> None:
    micro_batches_change_nothing(runs)
    with caught("the gradient of a step does not depend on its micro-batches"):
        micro_batches_change_nothing(runs, {LOSS: "self.compute_loss(batch) / batch.num_labels / len(batches)"})
