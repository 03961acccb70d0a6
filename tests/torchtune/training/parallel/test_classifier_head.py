"""Classifiers under tensor parallelism: the head's width is split, and all ranks have the logits of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.devices import own_device
from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import close, write_folder
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.modules import classifier_model
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import ClassificationLoss
from torchtune.modules.parallel import HeadParallel
from torchtune.modules.parallel.tensor_parallel import ParallelError
from torchtune.modules.peft import LoRA

CONVERSIONS = {"full": [], "lora": [LoRA(4, 8, train_modules=["score"])]}


def computed(folder: Path, kind: str, how: str) -> dict[str, torch.Tensor]:
    """Logits, loss and all gradients of a batch, on the host."""
    device = own_device()
    with torch.device("meta"):
        model = classifier_model(3, "torchtune.models.from_hf_config", checkpoint_dir=str(folder))
        apply_conversions(model, CONVERSIONS[kind])
    ranks.shard(model, how, device)
    torch.manual_seed(5)
    FullModelHFCheckpointer(folder).load_model(model, device=device)
    tokens = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1)).to(device)
    labels = torch.full((2, 24), -100, device=device)
    labels[:, -1] = torch.tensor([2, 0], device=device)
    result = {"logits": model(tokens).detach().cpu()}
    loss, _ = ClassificationLoss().sum_and_count(model(tokens, output="hidden"), labels, model.output)
    loss.backward()
    result["loss"] = loss.detach().cpu()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            result[name] = ranks.whole(parameter.grad)
    return result


def as_alone(kind: str) -> Callable[[Path], Any]:
    def case(folder: Path) -> None:
        alone = torch.load(folder / f"{kind}.pt")
        shared = computed(folder, kind, "ours")
        assert shared.keys() == alone.keys()
        for name, value in shared.items():
            close(value, alone[name])

    case.__name__ = kind
    return case


def test_two_ranks_compute_what_one_does(tmp_path):
    write_folder(tmp_path)
    for kind in CONVERSIONS:
        alone = computed(tmp_path, kind, "whole")
        assert alone["output.weight"].abs().max() > 0.01
        torch.save(alone, tmp_path / f"{kind}.pt")
    ranks.run(2, [as_alone(kind) for kind in CONVERSIONS], tmp_path)


@pytest.mark.parametrize(
    ("head", "num_ranks", "message"),
    [
        (classifier_model, 3, "3 does not divide the width 32 of output"),
        (lambda *_, **__: nn.Linear(32, 3), 2, "a head of the class Linear cannot be split"),
    ],
)
def test_head_that_cannot_be_split_is_refused(head, num_ranks, message, tmp_path):
    write_folder(tmp_path)
    with torch.device("meta"):
        module = head(3, "torchtune.models.from_hf_config", checkpoint_dir=str(tmp_path))
    module = getattr(module, "output", module)
    with pytest.raises(ParallelError, match=message):
        HeadParallel().check("output", module, num_ranks)
