"""Recurrent mixers whose sequences are sharded over ranks compute what one process does, which resumes their runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.devices import DEVICE, own_device
from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import build, write_folder
from tests.torchtune.models.families import FAMILIES
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.data import Documents, collate_documents
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.mixers import GatedDeltaNet, Mamba2, ShortConv
from torchtune.modules.parallel import SequenceShare
from torchtune.modules.parallel.context_parallel import shards_sequences
from torchtune.training import ParallelDims, clip_grad_norm_, parallelize

WIDTH = 8
# Lengths of the documents of a row: some cross a cut, end at it, or have less positions than the convolution has taps.
PACKED = (5, 50, 9, 1, 1, 2, 28)
SHORT = (3, 1, 4)  # 8 positions: with four ranks, shards that are shorter than the convolution's memory
LONG = (300, 84)  # more positions than ranks tell each other


def mixer(kind: str) -> nn.Module:
    """A mixer with the same weights in every process: those that the CPU draws."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        return build_mixer(kind).to(own_device())


def build_mixer(kind: str) -> nn.Module:
    common: dict[str, Any] = {"embed_dim": WIDTH, "conv_taps": 4, "norm_eps": 1e-6}
    if kind == "short convolution":
        return ShortConv(embed_dim=WIDTH, conv_taps=4)
    if kind == "mamba":
        return Mamba2(num_heads=4, head_dim=5, num_groups=2, state_dim=6, **common)
    if kind == "mamba, one group":
        scales = (0.5, 0.8, 1.5, 1.2, 0.7)
        return Mamba2(num_heads=4, head_dim=5, num_groups=1, state_dim=6, has_norm=False, scales=scales, **common)
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 6, "value_dim": 5}
    return GatedDeltaNet(fused=kind == "fused delta", **sizes, **common)


KINDS = ("delta", "fused delta", "mamba", "mamba, one group", "short convolution")
LENGTHS = {"packed": PACKED, "short": SHORT, "long": LONG}


def inputs(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and their gradients ``[2, s, d]``, and positions: rows with the documents in two orders."""
    lengths = LENGTHS[name]
    rows = []
    for order in (lengths, lengths[::-1]):
        rows.append(torch.cat([torch.arange(length) for length in order]))
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, 2, sum(lengths), WIDTH, generator=generator)
    device = own_device()
    return x.to(device), grad.to(device), torch.stack(rows).to(device)


def compute(
    module: nn.Module, x: Tensor, grad: Tensor, positions: Tensor, documents: Boundaries | None = None
) -> dict[str, Tensor]:
    """Output, and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    out = module(x, input_pos=positions, documents=documents)
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad} | {name: weight.grad for name, weight in module.named_parameters()}


def on_ranks(folder: Path) -> None:
    size = dist.get_world_size()
    rank = dist.get_rank()
    for kind in KINDS:
        for name in LENGTHS:
            module = mixer(kind)
            module.share = SequenceShare(dist.group.WORLD)
            # As on a CUDA device, where the boundaries of the whole sequence are known.
            shards_of_inputs = [tensor.chunk(size, dim=1)[rank] for tensor in inputs(name)]
            lengths = [*LENGTHS[name], *LENGTHS[name][::-1]]
            documents = Documents.from_lengths(lengths, shards_of_inputs[0].device)
            boundaries = Boundaries.of(documents, gap=module.conv_gap)
            values = compute(module, *shards_of_inputs, boundaries)
            for parameter in sorted(values.keys() - {"out", "x"}):  # in the same order on all ranks
                dist.all_reduce(values[parameter])  # as FSDP does
            shards: list[Any] = [None] * size
            dist.all_gather_object(shards, (values["out"].cpu(), values["x"].cpu()))
            values["out"], values["x"] = (torch.cat(parts, dim=1) for parts in zip(*shards, strict=True))
            if rank == 0:
                values = {part: tensor.cpu() for part, tensor in values.items()}
                torch.save(values, folder / f"{kind} {name} {size}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequence_mixers")
    for size in (2, 4):
        ranks.run(size, [on_ranks], folder)
    return folder


def test_mixers_that_share_sequences_are_found():
    model = nn.Sequential(mixer("delta"), mixer("short convolution"))
    assert not shards_sequences(model)
    model[1].share = SequenceShare(group=None)
    assert shards_sequences(model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_what_one_process_does(folder, kind, name, size):
    values = torch.load(folder / f"{kind} {name} {size}.pt")
    for part, wanted in compute(mixer(kind), *inputs(name)).items():
        wanted = wanted.cpu()
        assert (values[part] - wanted).abs().max() <= 2e-5 * wanted.abs().max(), part


STEPS = 2
# Of two ranks each: what one process resumes.
SPLITS = {"context": {"cp": 2}, "tensor": {"tp": 2}, "tensor and experts": {"tp": 2, "ep": 2}}
HYBRID = FAMILIES["qwen3_next"]  # Gated DeltaNet, attention and experts


def start(folder: Path, dims: ParallelDims, output: Path) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = build(folder / "hybrid")
    parallelize(model, dims, device=own_device())
    store = FullModelHFCheckpointer(folder / "hybrid", output_dir=output)
    store.load_model(model, device=own_device())
    return store, model.train(), torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, dims: ParallelDims, number: int) -> list[float]:
    """Loss and norm of the gradients, of documents of which one crosses the cut."""
    tokens = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(number))
    rows = [{"tokens": part, "labels": part.roll(-1)} for part in tokens.split([5, 27, 8])]
    batch = dims.collate(collate_documents)(rows).to(own_device())
    labels = batch.pop("labels")
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    loss = loss_fn(model(**batch), labels) * (labels.numel() / len(tokens))
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return [*dims.sum(loss.item()), norm.item()]


def train_and_save(folder: Path) -> None:
    for name, sizes in SPLITS.items():
        dims = ParallelDims(**sizes, world_size=2)
        dims.build_mesh(DEVICE)
        store, model, optimizer = start(folder, dims, folder / name)
        before = [step(model, optimizer, dims, number) for number in range(STEPS)]
        store.save("step_2", model, state={"optimizer": optimizer, "progress": {"step": STEPS}})
        store.close()
        after = step(model, optimizer, dims, STEPS)
        if dist.get_rank() == 0:
            torch.save((before, after), folder / f"{name}.pt")


# Of fp32 after a step: Adam divides gradients by their size, so that the rounding of small ones shows in the next norm.
ROUNDING = 1e-4


@pytest.mark.slow
def test_one_process_resumes_what_two_ranks_have_saved(tmp_path):
    write_folder(tmp_path / "hybrid", HYBRID)
    ranks.run(2, [train_and_save], tmp_path)
    alone = ParallelDims()
    _, model, optimizer = start(tmp_path, alone, tmp_path / "alone")
    expected = [step(model, optimizer, alone, number) for number in range(STEPS)]
    for name in SPLITS:
        before, after = torch.load(tmp_path / f"{name}.pt")
        assert before[0] == pytest.approx(expected[0], rel=1e-5), name
        for values, wanted in zip(before[1:], expected[1:], strict=True):
            assert values == pytest.approx(wanted, rel=ROUNDING), name
        store, model, optimizer = start(tmp_path, alone, tmp_path / name)
        state = {"optimizer": optimizer, "progress": {"step": 0}}
        store.resume(store.find_resume_point(), model, state)
        assert state["progress"] == {"step": STEPS}
        assert step(model, optimizer, alone, STEPS) == pytest.approx(after, rel=1e-5), name
