"""Experts on two processes train as on one, their state resumes on one, and tokens move as many bytes as they have."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.devices import DEVICE, own_device
from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import build, randomize_adapter, write_folder
from tests.torchtune.training.parallel.traffic import Traffic
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.modules.conversion import run_post_optimizer_hooks, run_pre_optimizer_hooks
from torchtune.modules.low_precision import QuantizeBase
from torchtune.modules.moe import LossFreeBalancing, tokens_per_expert
from torchtune.modules.peft import LoRA
from torchtune.training import ParallelDims, clip_grad_norm_, parallelize

LAYERS, WIDTH, CHOSEN, EXPERTS, LENGTH = 2, 32, 2, 4, 24
STEPS, CLIP = 3, 0.5
LORA = {"rank": 2, "alpha": 4, "apply_to_mlp": True}
# Kind of run -> the checkpoint, and the conversions of the model.
KINDS: dict[str, tuple[str, list[Any]]] = {
    "full": ("qwen3_moe", []),
    "lora": ("qwen3_moe", [lambda: LoRA(**LORA)]),
    "qlora": ("qwen3_moe", [lambda: QuantizeBase(block_size=8), lambda: LoRA(**LORA)]),
    "loss-free": ("glm4_moe", [lambda: LossFreeBalancing(rate=0.01)]),
}
RESUMED = ("full", "lora", "qlora")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_folder(folder / "qwen3_moe", "qwen3_moe", num_hidden_layers=LAYERS)
    small = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 0}
    write_folder(folder / "glm4_moe", ("Glm4Moe", small), num_hidden_layers=LAYERS)
    ranks.run(2, [on_two_ranks], folder)
    return folder


def start(folder, kind, dims, output):
    source, conversions = KINDS[kind]
    model = build(folder / source, *(make() for make in conversions))
    parallelize(model, dims, device=own_device())
    store = FullModelHFCheckpointer(folder / source, output_dir=output)
    store.load_model(model, device=own_device())
    randomize_adapter(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # With the default eps, rounding would decide on the steps of weights whose gradients are next to zero.
    return store, model.train(), torch.optim.AdamW(trained, lr=1e-3, eps=1e-5)


def step(model, optimizer, dims, number):
    """The loss, the norm of the gradients, and the bytes of all-to-alls of all ranks."""
    tokens = torch.randint(3, 320, (2, LENGTH), generator=torch.Generator().manual_seed(number)).to(DEVICE)
    labels = tokens.roll(-1, 1)
    labels[1, :10] = -100
    own_rows = slice(dims.data_rank, None, dims.data_size)
    with Traffic() as traffic:
        logits = model(tokens[own_rows])
        loss = F.cross_entropy(logits.flatten(0, 1), labels[own_rows].flatten(), reduction="sum") / (labels >= 0).sum()
        loss.backward()
    run_pre_optimizer_hooks(model)
    norm = clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    run_post_optimizer_hooks(model)
    total, moved = dims.sum(loss.item(), traffic.moved["all-to-all"])
    return [total, norm.item(), moved]


def train(folder, kind, dims):
    store, model, optimizer = start(folder, kind, dims, folder / f"{kind} {dims.world_size}")
    steps = [step(model, optimizer, dims, number) for number in range(STEPS)]
    state = {"optimizer": optimizer, "progress": {"step": STEPS}}
    if dims.world_size > 1 and kind in RESUMED:
        store.save("step_3", model, state=state, **({} if kind == "full" else {"contents": "adapter"}))
        store.close()
    weights = {name: ranks.whole(parameter) for name, parameter in model.named_parameters()}
    outcome = {"steps": steps, "weights": weights, "load": tokens_per_expert(model)}
    return outcome | {"after": step(model, optimizer, dims, STEPS)}


def on_two_ranks(folder):
    dims = ParallelDims(dp_shard=2, ep=2, world_size=2)
    dims.build_mesh(DEVICE)
    for kind in KINDS:
        outcome = train(folder, kind, dims)
        if dist.get_rank() == 0:
            torch.save(outcome, folder / f"{kind}.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_process(folder, kind):
    outcome, alone = torch.load(folder / f"{kind}.pt"), train(folder, kind, ParallelDims())
    for (loss, norm, moved), (loss_alone, norm_alone, _) in zip(outcome["steps"], alone["steps"], strict=True):
        assert abs(loss - loss_alone) <= 1e-6 * loss_alone
        assert norm == pytest.approx(norm_alone, rel=1e-5)
        assert norm > CLIP, "so that clipping matters"
        rows = 2 * LENGTH * CHOSEN * WIDTH * 4  # of both ranks: there and back, forward and backward
        counts = 2 * EXPERTS * 8
        assert moved == LAYERS * (4 * rows + counts) / 2, "half of what is exchanged stays on its rank"
    assert outcome["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        assert (outcome["weights"][name].float() - weight.float()).abs().max() <= 2e-5, name
    assert all(torch.equal(counts, outcome["load"][path]) for path, counts in alone["load"].items())


@pytest.mark.parametrize("kind", RESUMED)
def test_one_process_resumes_what_two_have_saved(folder, kind):
    store, model, optimizer = start(folder, kind, ParallelDims(), folder / f"{kind} 2")
    state = {"optimizer": optimizer, "progress": {"step": 0}}
    store.resume(store.find_resume_point(), model, state)
    assert state["progress"] == {"step": STEPS}
    after = torch.load(folder / f"{kind}.pt")["after"]
    assert step(model, optimizer, ParallelDims(), STEPS)[:2] == pytest.approx(after[:2], rel=1e-6)
