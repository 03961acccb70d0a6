"""Counts of a micro-batch on a CUDA device: launches, host waits and graphs, beside transformers."""

import importlib
from pathlib import Path

import pytest
import torch

from torchtune.modules.mixers import GatedDeltaNet, Mamba2

FOLDER = Path(__file__).parents[2] / "benchmarks"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("count_cuda")


def test_table_compares_models_of_whole_depth(counting):
    counts = {"layers": 2, "layer_forward": 4, "layer_backward": 6, "forward": 7, "backward": 8, "waits": {}}
    counts |= {"copies": 1, "peak": 3.0}
    doubled_counts = {
        **counts,
        "layer_forward": 8,
        "layer_backward": 12,
        "forward": 11,
        "backward": 14,
        "waits": {"a.py:1": 2},
    }
    row = {"family": "llama2", "method": "full", "depth": 10, "ours": counts, "transformers": doubled_counts}
    table = counting.table([row, {"family": "failed", "method": "full", "ours_error": "no kernel"}])
    cells = [line.split(" - ")[1] for line in table.splitlines() if " - " in line][12:]
    # Outside of the layers 5 launches; in a layer 5 of ours and 10 of the other, ten layers deep.
    assert cells == ["llama2", "full", "2 / 4", "3 / 6", "55 / 105", "0.52", "0 / 2", "1 / 1", "—", "—", "—", "3 / 3"]


def test_cut_models_keep_their_kinds_of_layers(counting):
    families = counting.families()
    assert families["qwen3_next"].description.mixer_layers == (0, 1, 2)
    assert families["qwen3_moe"].description.num_experts == counting.EXPERTS
    assert {family.description.num_layers for family in families.values()} == {counting.LAYERS}


@needs_cuda
@pytest.mark.cuda_host
@pytest.mark.filterwarnings("ignore")  # of transformers and peft about themselves
@pytest.mark.parametrize("method", ["full", "lora", "grpo"])
def test_launches_and_waits_of_a_micro_batch_are_counted(counting, method):
    row = counting.count_row("llama3_2", counting.families()["llama3_2"], method, compiled=False)
    assert row["ours"]["waits"] == {}
    depth = row["depth"]
    assert counting._launches(row["ours"], depth) <= 0.65 * counting._launches(row["transformers"], depth)


@needs_cuda
@pytest.mark.cuda_host
@pytest.mark.parametrize(("kind", "forward", "backward"), [("mamba", 0, 0), ("delta", 3, 3)])
def test_each_chunk_of_a_recurrence_adds_only_the_launches_of_its_state(counting, kind, forward, backward):
    """All states of Mamba 2 are one product; those of the delta rule are computed one after another."""
    sizes = {"embed_dim": 32, "conv_taps": 2, "norm_eps": 1e-6}
    if kind == "mamba":
        mixer = Mamba2(num_heads=2, head_dim=16, num_groups=1, state_dim=8, **sizes).to("cuda")
    else:
        mixer = GatedDeltaNet(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, **sizes).to("cuda")
    # The first passes also make the constants of a chunk, once in a process.
    mixer(torch.zeros(1, 64, 32, device="cuda")).sum().backward()
    mixer.zero_grad(set_to_none=True)
    counts = []
    for chunks in (2, 10):
        x = torch.zeros(1, 64 * chunks, 32, device="cuda", requires_grad=True)
        operators = counting.Operators()
        with operators:
            operators.part = "forward"
            out = mixer(x)
            operators.part = "backward"
            out.sum().backward()
        mixer.zero_grad(set_to_none=True)
        counts.append(operators.counts)
    assert counts[1]["forward"] - counts[0]["forward"] == 8 * forward
    assert counts[1]["backward"] - counts[0]["backward"] == 8 * backward
    # Operators inside of the library's own ones are counted, and so is what makes up a composite operator.
    assert counts[0]["forward"] > 30


@needs_cuda
@pytest.mark.cuda_host
@pytest.mark.filterwarnings("ignore")
def test_layers_compile_without_breaks_and_once(counting):
    row = counting.count_row("qwen3", counting.families()["qwen3"], "full", compiled=True)
    assert row["compiled"]["breaks"] == row["compiled"]["late"] == 0


@needs_cuda
@pytest.mark.cuda_host
def test_host_waits_for_tokens_once_per_check(counting):
    from torchtune.generation import stream_tokens

    family = counting.families()["llama3_2"]
    model = counting.OurSide(family.description, family.spec, "full", torch.device("cuda")).model
    waits = []
    for new in (8, 64):
        with counting.watched_waits() as counted_waits:
            assert list(stream_tokens(model, [[5, 6, 7], [8]], max_new_tokens=new, temperature=0.0))
        waits.append(counted_waits.total())
    assert waits[1] - waits[0] <= 2 * 7  # seven more checks: tokens, and whether log-probs are finite
