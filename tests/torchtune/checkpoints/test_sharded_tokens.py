"""New tokens of a sharded model: they begin, learn and are saved as on one device, and resume on other ranks."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import build, close, resume, write_folder
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA
from torchtune.training import add_token_rows, fit_vocabulary

OLD = 320
# One of the two new tokens is described by two old ones.
TOKENIZER = SimpleNamespace(
    vocab_size=OLD + 2, new_tokens=["<think>", "</think>"], described_tokens={"<think>": [7, 9]}
)
CONTENTS = {"full": "model", "lora": ("adapter", "merged")}
CASES = [
    ("llama", "full", "data"),
    ("qwen2_tied", "full", "ours"),
    ("llama", "lora", "ours"),
    ("qwen2_tied", "lora", "ours"),
    ("qwen2_tied", "lora", "data"),
]


def tokens() -> torch.Tensor:
    """[2, 25] ids, old and new ones in both rows."""
    ids = torch.randint(3, OLD, (2, 25), generator=torch.Generator().manual_seed(2))
    ids[:, 3] = OLD
    ids[:, 20] = OLD + 1
    return ids


def grown(folder: Path, shape: str, kind: str, how: str = "whole") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with new tokens, and its optimizer; its adapter, if any, is drawn from the same seed on all ranks."""
    conversions = [LoRA(4, 8)] if kind == "lora" else []
    model = build(folder / shape, *conversions)
    add_token_rows(model, TOKENIZER)
    ranks.shard(model, how)
    torch.manual_seed(5)
    FullModelHFCheckpointer(folder / shape).load_model(model)
    fit_vocabulary(model, TOKENIZER)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> list[float]:
    """Sums of the losses of two steps on a rank's rows."""
    loss_fn = LinearCrossEntropyLoss(num_output_chunks=2)
    losses = []
    for _ in range(2):
        hidden = model(batch[:, :-1], output="hidden")
        total, _ = loss_fn.sum_and_count(hidden, batch[:, 1:], model.output)
        (total / 48).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: ranks.whole(parameter) for name, parameter in model.named_parameters()}


def as_alone(shape: str, kind: str, how: str) -> Callable[[Path], Any]:
    """Begin as one process does, bit for bit, train as it does, and save what it would."""

    def case(folder: Path) -> None:
        alone = torch.load(folder / f"{shape} {kind}.pt")
        model, optimizer = grown(folder, shape, kind, how)
        start = values(model)
        assert start.keys() == alone["start"].keys()
        for name, value in start.items():
            assert torch.equal(value, alone["start"][name]), f"{case.__name__}: {name}"
        batch = tokens()
        if how == "data":
            batch = batch[dist.get_rank() :][:1]
        losses = torch.tensor(train(model, optimizer, batch))
        if how == "data":
            dist.all_reduce(losses)
        close(losses, torch.tensor(alone["losses"]))
        for name, value in values(model).items():
            torch.testing.assert_close(
                value, alone["end"][name], atol=2e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
            )
        store = FullModelHFCheckpointer(folder / shape, output_dir=folder / f"out {case.__name__}")
        state = {"optimizer": optimizer, "progress": {}}
        store.save("step_2", model, state=state, contents=CONTENTS[kind], tokenizer=None)

    case.__name__ = f"{shape} {kind} {how}"
    return case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded_tokens")
    for shape in ("llama", "qwen2_tied"):
        write_folder(folder / shape, shape, num_hidden_layers=1)
        for kind in CONTENTS:
            model, optimizer = grown(folder, shape, kind)
            start = values(model)
            losses = train(model, optimizer, tokens())
            torch.save({"start": start, "losses": losses, "end": values(model)}, folder / f"{shape} {kind}.pt")
    return folder


def test_rows_begin_as_the_mean_of_tokens_or_of_the_description(folder):
    old = load_file(folder / "llama" / "model.safetensors")
    start = torch.load(folder / "llama full.pt")["start"]
    for name, external in (("tok_embeddings", "model.embed_tokens"), ("output", "lm_head")):
        weight = old[f"{external}.weight"]
        described, plain = start[f"{name}.weight"][OLD:]
        torch.testing.assert_close(described, weight[[7, 9]].mean(dim=0))
        torch.testing.assert_close(plain, weight.mean(dim=0))


def test_two_ranks_train_new_tokens_as_one_and_one_resumes(folder):
    ranks.run(2, [as_alone(*case) for case in CASES], folder)
    for shape, kind, how in CASES:
        output = folder / f"out {shape} {kind} {how}"
        model, optimizer = grown(folder, shape, kind)
        resume(FullModelHFCheckpointer(folder / shape, output_dir=output), model, optimizer=optimizer)
        alone = torch.load(folder / f"{shape} {kind}.pt")
        for name, value in values(model).items():
            torch.testing.assert_close(value, alone["end"][name], atol=2e-4, rtol=1e-3)
        assert {len(state) for state in optimizer.state.values()} == {3}
        saved = load_file(output / "step_2" / "model.safetensors")["model.embed_tokens.weight"]
        torch.testing.assert_close(saved[OLD:], _embedding(model)[OLD:])


def _embedding(model: nn.Module) -> torch.Tensor:
    embedding = model.tok_embeddings
    new_rows = getattr(embedding, "new_rows", embedding.weight[OLD:])
    return torch.cat([embedding.weight[:OLD], new_rows]).detach()
