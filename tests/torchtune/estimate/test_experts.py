"""Experts on a simulated cluster: what all-to-alls send, and how long links take for it, against the formulas."""

from pathlib import Path

import pytest
import torch

from tests.recipes.runs import load_recipe, write_config
from tests.torchtune.checkpoints.small import write_folder
from torchtune.config import load_and_check
from torchtune.estimate import parse_cluster
from torchtune.estimate._observer import Work, _balanced_ends
from torchtune.estimate._roofline import LATENCY, LINKS, _send
from torchtune.estimate._simulate import simulate
from torchtune.modules.kernels.grouped import RowGroups
from torchtune.modules.moe.frozen_experts import row_ends

RECIPE = "full_finetune_distributed"
LAYERS = 2
WIDTH = 32
CHOSEN = 2  # experts of a token
EXPERTS = 4
TOKENS = 2 * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_folder(folder / "checkpoint", "qwen3_moe", num_hidden_layers=LAYERS)
    return folder


@pytest.mark.parametrize("recomputes", [False, True])
def test_tokens_of_experts_are_sent_and_returned(folder, recomputes):
    main = load_recipe(RECIPE, folder).recipe_main
    settings = {"expert_parallel_dim": 2, "enable_activation_checkpointing": recomputes, "dtype": "bf16"}
    config = write_config(RECIPE, folder, folder / "never", batch_size=2, **settings)
    observer = simulate(main, load_and_check(config, ["tokenizer.max_seq_len=64"], main), 4)
    rows = TOKENS * CHOSEN * WIDTH * 2  # bytes in bfloat16
    counts = EXPERTS * 8  # bytes of integers
    # Forward: the counts, the rows, and the rows back; backward: the gradients of the rows both ways.
    messages = {"forward": 3 * LAYERS, "backward": 2 * LAYERS}
    sizes = {"forward": LAYERS * (2 * rows + counts), "backward": LAYERS * 2 * rows}
    if recomputes:
        messages["backward"] += messages["forward"]
        sizes["backward"] += sizes["forward"]
    for phase in ("forward", "backward"):
        work = observer.work[0, phase]
        assert work.waiting["all-to-all", (0, 1)] == messages[phase]
        assert work.awaited["all-to-all", (0, 1)] == sizes[phase]


def test_slower_link_decides_the_time_of_an_all_to_all():
    _, device = parse_cluster("64xH100")  # 450 GB/s within a machine of 8, 50 GB/s between machines

    def seconds(*ranks: int) -> float:
        work = Work()
        work.waiting["all-to-all", ranks] = 1
        work.awaited["all-to-all", ranks] = 10**9
        return (_send(work.waiting, work.awaited, device) - LATENCY) * LINKS

    assert seconds(*range(8)) == pytest.approx(7 / 8 / 450)
    assert seconds(*range(0, 64, 8)) == pytest.approx(7 / 8 / 50)
    assert seconds(*range(64)) == pytest.approx(56 / 64 / 50)


@pytest.mark.parametrize(("experts_per_group", "ends"), [(1, [*range(4, 41, 4)]), (3, [12, 24, 36, 40]), (5, [20, 40])])
def test_simulated_groups_of_quantized_experts_have_equal_rows(experts_per_group, ends):
    groups = RowGroups.of(torch.full((10,), 4))
    assert row_ends(groups.ends, experts_per_group, 40) == ends
    assert _balanced_ends(groups.ends, experts_per_group, 40) == ends
