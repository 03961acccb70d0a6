"""Bugs that libraries of this kind have shipped, put in one by one: the contract suite catches each for its reason.

A bug counts as caught where a check raises ``Broken`` with the sentence of the promise that the bug breaks. It counts
as put in where its text stood exactly once in the recipe, or where the run called the function that carries it;
otherwise the test ends with ``NotInjected``. ``test_contract.py`` shows that the checks pass without the bugs.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes import checks
from tests.recipes.runs import ADAPTERS, TRAINING, WEIGHTS, NotInjected
from torchtune import training
from torchtune.data import BatchLoader, Documents
from torchtune.modules.peft import LoRA

Bug = Callable[..., Any]
FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"


@contextmanager
def caught(sentence: str) -> Iterator[None]:
    """The block breaks this promise; every other error goes up."""
    with pytest.raises(checks.Broken, match=re.escape(sentence)):
        yield


@contextmanager
def injected(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Bug) -> Iterator[None]:
    """Let ``bug(original, *args, **kwargs)`` stand for ``owner.name`` in the block, and see that it is called."""
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return bug(original, *args, **kwargs)

    monkeypatch.setattr(owner, name, wrong)
    yield
    monkeypatch.setattr(owner, name, original)
    if not calls:
        raise NotInjected(f"nobody called {name}")


LABELS_OF_BATCH = 'int((batch["labels"] != CROSS_ENTROPY_IGNORE_IDX).sum())'

# In the text of every recipe: (what stands there, the bug, the check, the promise that it breaks).
IN_TEXT: dict[str, tuple[str, str, Callable[..., None], str]] = {
    "loss averaged per micro-batch": (
        "self.compute_loss(batch) / max(num_labels, 1)",
        f"self.compute_loss(dict(batch)) / {LABELS_OF_BATCH} / len(batches)",
        checks.accumulation_changes_nothing,
        "the loss of step 1 is the same",
    ),
    "schedule restarted on resume": (
        '            state["lr_scheduler"] = self.lr_scheduler\n',
        "            pass\n",
        checks.resume_equals_uninterrupted,
        "learning rates go on after step 2",
    ),
    "optimizer state lost on resume": (
        '            "optimizer": self.optimizer,\n',
        "",
        checks.resume_equals_uninterrupted,
        "losses go on after step 2",
    ),
    "gradients dropped before the step": (
        "self.optimizer.step()\n",
        "self.optimizer.zero_grad(set_to_none=True) or self.optimizer.step()\n",
        checks.training_learns,
        "six epochs lower the loss by more than 1",
    ),
    "schedule never stepped": (
        "self.lr_scheduler.step()\n",
        "pass\n",
        checks.training_learns,
        "six epochs lower the loss by more than 1",
    ),
    "validation loss averaged over batches": (
        "total += self.compute_loss(batch).item()\n",
        f"total += self.compute_loss(dict(batch)).item() / {LABELS_OF_BATCH} * 6\n",
        checks.validation_is_the_mean_over_labels,
        "the validation loss is the mean over all labels",
    ),
}


@pytest.mark.parametrize("bug", IN_TEXT)
@pytest.mark.parametrize("name", TRAINING)
def test_in_the_text_of_a_recipe(name: str, bug: str, tmp_path: Path) -> None:
    text, wrong, check, sentence = IN_TEXT[bug]
    with caught(sentence):
        check(name, tmp_path, changes={text: wrong})


@pytest.mark.parametrize("name", ADAPTERS)
def test_dropout_left_off_after_validation(name: str, tmp_path: Path) -> None:
    bug = {"        self.model.train()\n        total, num_labels": "        total, num_labels"}
    with caught("validation changes no loss"):
        checks.validation_leaves_training_alone(name, tmp_path, changes=bug)


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_of_all_steps_added_up(name: str, tmp_path: Path) -> None:
    bug = {"                self.optimizer.zero_grad(set_to_none=True)\n": ""}
    with caught("the norm of step 2 is that of plain torch"):
        checks.losses_follow_plain_torch(name, tmp_path, changes=bug)


def end_token_unlabelled(collate: Bug, batch: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    collated = collate(batch, **settings)
    collated["labels"][collated["labels"] == 2] = -100
    return collated


def documents_forgotten(collate: Bug, batch: list[Any], **settings: Any) -> dict[str, Any]:
    collated = collate(batch, **settings)
    collated["documents"] = Documents.from_lengths([collated["tokens"].numel()])
    return collated


def positions_go_on(collate: Bug, batch: list[Any], **settings: Any) -> dict[str, Any]:
    collated = collate(batch, **settings)
    collated["input_pos"] = torch.arange(collated["tokens"].numel())[None]
    return collated


def labels_shifted_again(collate: Bug, batch: list[Any], **settings: Any) -> dict[str, Any]:
    collated = collate(batch, **settings)
    collated["labels"] = torch.roll(collated["labels"], -1, dims=1)
    return collated


@pytest.mark.parametrize(
    ("bug", "check", "sentence"),
    [
        (end_token_unlabelled, checks.end_of_turn_is_trained, "has its end among the labels"),
        (documents_forgotten, checks.packing_changes_nothing, "the loss of step 1 is the same"),
        (positions_go_on, checks.documents_restart_positions, "positions restart with every document"),
        (labels_shifted_again, checks.loss_equals_transformers, "the first loss is that of transformers"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Bug, check: Bug, sentence: str) -> None:
    import torchtune.data

    with injected(monkeypatch, torchtune.data, "collate_documents", bug), caught(sentence):
        check(FULL, tmp_path)


def test_first_batches_repeated_after_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_position(load: Bug, self: BatchLoader, state: dict[str, Any]) -> None:
        load(self, state)
        start_of_epoch = {**self.state_dict(), "step": 0}
        if start_of_epoch.keys() != self.state_dict().keys():
            raise NotInjected("the position of a loader has another name")
        load(self, start_of_epoch)

    with injected(monkeypatch, BatchLoader, "load_state_dict", forget_position), caught("steps after step 2 are run"):
        checks.resume_equals_uninterrupted(FULL, tmp_path)


def test_random_numbers_start_again_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(load: Bug, self: training.RNGState, state: dict[str, Any]) -> None:
        pass

    with injected(monkeypatch, training.RNGState, "load_state_dict", forget), caught("losses go on after step 2"):
        checks.resume_equals_uninterrupted(LORA, tmp_path)


def test_gradients_not_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def norm_alone(clip: Bug, parameters: Any, max_norm: float | None, **settings: Any) -> torch.Tensor:
        return clip(parameters, None, **settings)

    bug = injected(monkeypatch, training, "clip_grad_norm_", norm_alone)
    with bug, caught("the loss of step 2 is that of plain torch"):
        checks.losses_follow_plain_torch(FULL, tmp_path)


def test_adapter_merged_with_the_wrong_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(merged: Bug, self: LoRA, key: str, weight: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        return weight + (merged(self, key, weight, model) - weight) * (self.rank / self.alpha)

    with injected(monkeypatch, LoRA, "merged", unscaled), caught("what was saved computes what was trained"):
        checks.export_equals_trained(LORA, tmp_path)


def test_the_harness_is_not_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that was not put in and an error of the harness end the test, whatever was to be caught."""
    nowhere = {"text that no recipe has": ""}
    with pytest.raises(NotInjected, match="stands 0 times"), caught("a promise"):
        checks.training_learns(FULL, tmp_path, changes=nowhere)
    with pytest.raises(NotInjected, match="stands 6 times"), caught("a promise"):
        checks.training_learns(FULL, tmp_path, changes={"# twin of training\n": ""})
    with (
        pytest.raises(NotInjected, match="nobody called end_of_turn_is_trained"),
        injected(monkeypatch, checks, "end_of_turn_is_trained", end_token_unlabelled),
    ):
        pass
    with pytest.raises(AssertionError, match="of the harness"), caught("a promise"):
        raise AssertionError("of the harness")
