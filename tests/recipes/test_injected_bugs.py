"""Bugs that libraries of this kind have shipped, put in one by one: the contract suite catches each for its reason.

A bug counts as caught where a check raises ``Broken`` with the sentence of the promise that the bug breaks. It counts
as put in where its text stood exactly once in the recipe, or where the run called the function that carries it;
otherwise the test ends with ``NotInjected``. ``test_contract.py`` shows that the checks pass without the bugs.
"""

import functools
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.recipes import checks
from tests.recipes import losses_in_silence as silence
from tests.recipes.runs import ADAPTERS, TRAINING, WEIGHTS, NotInjected
from torchtune import training
from torchtune.data import BatchLoader, Documents
from torchtune.generation import sample
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


LABELS_OF_BATCH = "batch.num_labels"

# In the text of every recipe: (what stands there, the bug, the check, the promise that it breaks).
IN_TEXT: dict[str, tuple[str, str, Callable[..., None], str]] = {
    "loss averaged per micro-batch": (
        "self.compute_loss(batch) / max(step.num_terms, 1)",
        f"self.compute_loss(batch) / {LABELS_OF_BATCH} / len(step.batches)",
        checks.accumulation_changes_nothing,
        "the loss of step 1 is the same",
    ),
    "schedule restarted on resume": (
        '{**state, "lr_scheduler": self.lr_scheduler}\n',
        "state\n",
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
        checks.schedule_runs_over_all_epochs,
        "the learning rate follows the schedule over all epochs",
    ),
    "validation loss averaged over batches": (
        "(self.compute_loss(batch), batch.num_terms)",
        f"(self.compute_loss(batch) / {LABELS_OF_BATCH}, 1)",
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


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name in TRAINING])
def test_dropout_left_off_after_validation(name: str, tmp_path: Path) -> None:
    bug = {"        self.model.train()\n        return means": "        return means"}
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


def nothing(*_: Any, **__: Any) -> None:
    """A check that checks nothing."""


def ends_unlabelled(cut: Bug, tokens: list[int], mask: list[bool], *settings: Any) -> Any:
    """Of rows that are cut, the last token with a label loses it."""
    kept, masked = cut(tokens, mask, *settings)
    last = max((i for i, is_masked in enumerate(masked) if not is_masked), default=None)
    if len(kept) < len(tokens) and last is not None:
        masked = [*masked[:last], True, *masked[last + 1 :]]
    return kept, masked


def from_whatever_forward_returns(draw: Bug, model: Any, input_pos: Any, x: Any, *noise: Any, **options: Any) -> Any:
    """Draw from hidden states where a loss has told the model to return them."""
    if not model.skip_output_layer:
        return draw(model, input_pos, x, *noise, **options)
    states = model(x, input_pos=input_pos, mask=options.pop("mask"))[:, -1:]
    return sample(states[:, -1], **options), states


# Losses in silence: (what carries the bug, the bug, the promise that it breaks).
SILENT: dict[str, tuple[str, Bug, Callable[..., None], str]] = {
    "adapter of a full recipe not saved": (
        "torchtune.training.checkpointing._store.check_contents",
        nothing,
        silence.what_was_trained_is_saved,
        "what was trained is saved",
    ),
    "adapter left out of a save": (
        "torchtune.training.checkpointing._store.check_contents",
        nothing,
        silence.a_save_of_a_model_with_an_adapter_has_it,
        "a save has what was trained",
    ),
    "warmup from a rate of zero": (
        "torchtune.training.lr_schedulers._with_warmup",
        lambda make, optimizer, *args: LambdaLR(optimizer, lambda step: float(step > 0)),
        silence.the_first_step_trains,
        "the first step of a warmup trains",
    ),
    "a flag decides what forward returns": (
        "torchtune.generation._generation.generate_next_token",
        from_whatever_forward_returns,
        silence.generation_gets_logits,
        "a flag on a model does not change what it generates",
    ),
    "cut rows teach no stop": (
        "torchtune.modules.transforms.tokenizers._hf_model_tokenizer.truncate_row",
        ends_unlabelled,
        silence.a_cut_row_teaches_its_end,
        "the end of a turn of a cut row is trained on",
    ),
    "locks that nobody minds": (
        "torchtune.utils._folder_lock._is_dead",
        lambda is_dead, owner: True,
        silence.two_runs_do_not_share_a_folder,
        "an output folder has one run at a time",
    ),
    "settings of a resume not compared": (
        "torchtune.training.checkpointing._store.check_resumed_settings",
        nothing,
        silence.a_resumed_run_has_the_learning_rate_that_it_was_given,
        "a setting that a resume is given takes effect, or is refused",
    ),
    "checksums not compared": (
        "torchtune.training.checkpointing._store.damage",
        lambda damage, *args: [],
        silence.a_flipped_bit_is_not_resumed,
        "a flipped bit does not get into a resumed run",
    ),
    "a copy over a changed file": (
        "torchtune._cli.cp.keep",
        nothing,
        silence.copying_keeps_what_was_there,
        "tune cp loses no file",
    ),
}


def call(check: Callable[..., None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(folder, monkeypatch) if check is silence.copying_keeps_what_was_there else check(folder)


@pytest.mark.parametrize("bug", SILENT)
def test_lost_in_silence(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, wrong, check, sentence = SILENT[bug]
    owner, _, name = path.rpartition(".")
    with injected(monkeypatch, pkgutil.resolve_name(owner), name, wrong), caught(sentence):
        call(check, tmp_path, monkeypatch)


@pytest.mark.parametrize("check", dict.fromkeys(row[2] for row in SILENT.values()), ids=lambda check: check.__name__)
def test_nothing_is_lost_without_the_bug(check: Callable[..., None], tmp_path: Path, monkeypatch: Any) -> None:
    call(check, tmp_path, monkeypatch)


def test_the_harness_is_not_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that was not put in and an error of the harness end the test, whatever was to be caught."""
    nowhere = {"text that no recipe has": ""}
    with pytest.raises(NotInjected, match="stands 0 times"), caught("a promise"):
        checks.training_learns(FULL, tmp_path, changes=nowhere)
    with pytest.raises(NotInjected, match=r"stands [2-9] times"), caught("a promise"):
        checks.training_learns(FULL, tmp_path, changes={"self.step_metrics": ""})
    with (
        pytest.raises(NotInjected, match="nobody called end_of_turn_is_trained"),
        injected(monkeypatch, checks, "end_of_turn_is_trained", end_token_unlabelled),
    ):
        pass
    with pytest.raises(AssertionError, match="of the harness"), caught("a promise"):
        raise AssertionError("of the harness")
