"""Eight bugs that libraries of this kind have shipped, put in one by one: the contract suite catches each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtune.data
from tests.recipes import checks
from tests.recipes.runs import TRAINING
from torchtune.data import BatchLoader, Documents, collate_documents
from torchtune.modules.peft import LoRA


@pytest.fixture(params=TRAINING)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@contextmanager
def caught() -> Iterator[None]:
    with pytest.raises(AssertionError):
        yield


def test_loss_averaged_per_micro_batch(name: str, tmp_path: Path) -> None:
    mean = 'self.compute_loss(dict(batch)) / int((batch["labels"] != CROSS_ENTROPY_IGNORE_IDX).sum()) / len(batches)'
    bug = {"self.compute_loss(batch) / max(num_labels, 1)": mean}
    with caught():
        checks.accumulation_changes_nothing(name, tmp_path, changes=bug)


def end_token_unlabelled(batch: list[dict[str, Any]]) -> dict[str, Any]:
    collated = collate_documents(batch)
    collated["labels"][collated["labels"] == 2] = -100
    return collated


def documents_forgotten(batch: list[Any]) -> dict[str, Any]:
    collated = collate_documents(batch)
    collated["documents"] = Documents.from_lengths([collated["tokens"].numel()])
    return collated


def positions_go_on(batch: list[Any]) -> dict[str, Any]:
    collated = collate_documents(batch)
    collated["input_pos"] = torch.arange(collated["tokens"].numel())[None]
    return collated


def labels_shifted_again(batch: list[Any]) -> dict[str, Any]:
    collated = collate_documents(batch)
    collated["labels"] = torch.roll(collated["labels"], -1, dims=1)
    return collated


@pytest.mark.parametrize(
    ("collate", "check"),
    [
        (end_token_unlabelled, checks.end_of_turn_is_trained),
        (documents_forgotten, checks.packing_changes_nothing),
        (positions_go_on, checks.documents_restart_positions),
        (labels_shifted_again, checks.loss_equals_transformers),
    ],
    ids=lambda value: value.__name__,
)
def test_wrong_batches(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collate: Any, check: Any) -> None:
    monkeypatch.setattr(torchtune.data, "collate_documents", collate)
    with caught():
        check(name, tmp_path)


def test_schedule_restarted_on_resume(name: str, tmp_path: Path) -> None:
    bug = {'            state["lr_scheduler"] = self.lr_scheduler\n': "            pass\n"}
    with caught():
        checks.resume_equals_uninterrupted(name, tmp_path, changes=bug)


def test_first_batches_repeated_after_resume(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = BatchLoader.load_state_dict

    def forget_position(self: BatchLoader, state: dict[str, Any]) -> None:
        load(self, state)
        start_of_epoch = {**self.state_dict(), "step": 0}
        assert start_of_epoch.keys() == self.state_dict().keys()
        load(self, start_of_epoch)

    monkeypatch.setattr(BatchLoader, "load_state_dict", forget_position)
    with caught():
        checks.resume_equals_uninterrupted(name, tmp_path)


def test_adapter_merged_with_the_wrong_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = LoRA.merged

    def unscaled(self: LoRA, key: str, weight: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        return weight + (merged(self, key, weight, model) - weight) * (self.rank / self.alpha)

    monkeypatch.setattr(LoRA, "merged", unscaled)
    with caught():
        checks.export_equals_trained("lora_finetune_single_device", tmp_path)
