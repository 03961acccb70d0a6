"""Devices by name, mistakes as one sentence, and what the ledger makes of allocations."""

import pytest
import torch
import yaml

from torchtune._cli.estimate import simulate_run
from torchtune._recipe_registry import recipe_named_by, resolve_config
from torchtune.estimate import parse_cluster, parse_memory
from torchtune.estimate._fit import Candidate, Search, candidates
from torchtune.estimate._ledger import Ledger, highest_by_phase
from torchtune.estimate._observer import Observer
from torchtune.estimate._roofline import step_time
from torchtune.utils import FakeTensorMode, UserError


def test_cluster_and_memory_texts_are_parsed():
    number, device = parse_cluster("64xH100")
    assert (number, device.name, device.bf16) == (64, "H100", 989.4e12)
    assert parse_cluster("rtx-4090")[1] is parse_cluster("4090")[1]
    assert parse_memory("80GiB") == 80 * 2**30
    assert parse_memory("24GB") == 24e9
    for text in ("", "lots", "0GB", "80TB"):
        with pytest.raises(UserError, match="give the memory of a device, for example 80GiB"):
            parse_memory(text)


@pytest.mark.parametrize(
    ("config", "cluster", "overrides", "said"),
    [
        ("llama3_1/8B_full", "8xH10", [], "did you mean H100"),
        ("llama3_1/8B_full", "0xH100", [], "give a number"),
        ("llama3_1/8B_full_single_device", "64xH100", [], "runs on one device"),
        ("llama3_1/8B_full", "6xH100", ["tensor_parallel_dim=4"], "6 processes cannot be divided"),
    ],
)
def test_invalid_simulation_is_refused(config, cluster, overrides, said):
    path = resolve_config(config)
    with pytest.raises(UserError, match=said):
        simulate_run(recipe_named_by(path), path, overrides, cluster, None)


def test_peak_memory_counts_live_tensors():
    ledger = Ledger()
    parameter = torch.empty(1024)  # 4 KiB
    ledger.add(parameter.untyped_storage(), "parameters", "kept", "here")
    ledger.enter("forward")
    freed_activation = torch.empty(2048)
    ledger.add(freed_activation.untyped_storage(), "activations", "gone", "here")
    del freed_activation
    late_activation = torch.empty(1)
    ledger.add(late_activation.untyped_storage(), "activations", "late", "here")
    peaks = highest_by_phase(ledger.peaks())
    assert peaks["set-up"].total == 4096
    assert peaks["forward"].total == 4096 + 8192
    assert peaks["forward"].components["activations"] == 8192
    assert peaks["forward"].reached_by == "gone in here"


def test_candidates_keep_the_rows_of_a_step():
    candidate_overrides = list(candidates({"batch_size": 4, "gradient_accumulation_steps": 2}, 1))
    assert candidate_overrides[0] == ("batch_size=8", "gradient_accumulation_steps=1")
    assert () in candidate_overrides
    for overrides in candidate_overrides:
        sizes = {"batch_size": 4, "gradient_accumulation_steps": 2}
        for override in overrides:
            key, _, size = override.partition("=")
            sizes[key] = int(size)
        assert sizes["batch_size"] * sizes["gradient_accumulation_steps"] == 8, overrides


def test_expert_parallelism_is_tried_only_with_experts():
    settings = {"expert_parallel_dim": 1, "tensor_parallel_dim": 1}
    assert list(candidates(settings, 4)) == [()]
    assert list(candidates(settings, 4, has_experts=True)) == [
        (),
        ("expert_parallel_dim=2",),
        ("expert_parallel_dim=4",),
    ]


def test_every_doubling_of_a_dimension_is_slower():
    slowdowns = candidates({"expert_parallel_dim": 2}, 8, has_experts=True)
    assert list(slowdowns) == [(), ("expert_parallel_dim=4",), ("expert_parallel_dim=8",)]
    assert list(slowdowns.values()) == pytest.approx([1, 1.02, 1.02**2])


def test_tiles_of_feed_forward_layers_are_tried_for_long_rows_only():
    adapter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 8}
    settings = {"model_converters": [adapter], "tokenizer": {"max_seq_len": 16_384}}
    assert list(candidates(settings, 1)) == [()]
    settings["tokenizer"]["max_seq_len"] = 131_072
    unchanged, (override,) = candidates(settings, 1)
    assert unchanged == ()
    key, _, value = override.partition("=")
    tiled = {"_component_": "torchtune.modules.TiledMLP", "tile_size": 16_384}
    assert (key, yaml.safe_load(value)) == ("model_converters", [adapter, tiled])
    settings["model_converters"] = [tiled]
    assert list(candidates(settings, 1)) == [()]


RECOMPUTE = "enable_activation_checkpointing=True"
OFFLOAD = "enable_activation_offloading=True"


@pytest.mark.parametrize(
    ("seconds", "limit", "wanted"),
    [
        ({RECOMPUTE: 0.40, OFFLOAD: 0.01}, 60, (OFFLOAD,)),  # a fast link to host memory
        ({RECOMPUTE: 0.01, OFFLOAD: 0.40}, 60, (RECOMPUTE,)),  # a slow one, and collectives to wait for
        ({RECOMPUTE: 0.40, OFFLOAD: 0.01}, 30, (RECOMPUTE, OFFLOAD)),
        ({RECOMPUTE: 0.40, OFFLOAD: 0.01}, 200, ("batch_size=2", "gradient_accumulation_steps=1")),
    ],
)
def test_the_fastest_is_found_whatever_a_lever_costs_on_a_device(seconds, limit, wanted):
    """Against trying everything: the order by rough factors would take the first that fits."""
    settings = {
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
    }

    def size(overrides: tuple[str, ...]) -> float:
        saved = {RECOMPUTE: 45.0, OFFLOAD: 42.0, "batch_size=2": -60.0}
        return 100 - sum(saved.get(text, 0) for text in overrides)

    def take(overrides: tuple[str, ...]) -> Candidate:
        slower = {**seconds, "batch_size=2": -0.05}
        return Candidate(overrides, size(overrides), 1 + sum(slower.get(text, 0) for text in overrides))

    messages: list[str] = []
    search = Search(settings, 1, limit, size, take, messages.append)
    fitting = search.fitting(with_last_resorts=False)
    everything = [take(overrides) for overrides in candidates(settings, 1)]
    assert fitting[0] == min(
        (candidate for candidate in everything if candidate.peak <= limit), key=lambda candidate: candidate.seconds
    )
    assert fitting[0].overrides == wanted
    assert len(messages) <= len(everything)


def test_products_in_float8_take_half_the_time_of_bf16():
    times = {}
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        with FakeTensorMode():
            left = torch.empty(4096, 4096, dtype=dtype)
            right = torch.empty(4096, 4096, dtype=dtype).t()
            scale = torch.ones(())
            with Observer() as observer:
                if dtype is torch.bfloat16:
                    torch.mm(left, right)
                else:
                    torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16)
        (work,) = observer.work.values()
        assert work.flops == {dtype: 2 * 4096**3}
        for name in ("H100", "A100"):
            computing = step_time([work], parse_cluster(name)[1]).computing
            times[name, dtype] = computing
    assert times["H100", torch.float8_e4m3fn] == pytest.approx(times["H100", torch.bfloat16] / 2, rel=0.01)
    assert times["A100", torch.float8_e4m3fn] == pytest.approx(times["A100", torch.bfloat16] * 312 / 19.5, rel=0.01)


def test_a_depthwise_convolution_has_the_products_of_its_own_channels():
    with FakeTensorMode():
        x = torch.empty(1, 256, 1000, requires_grad=True)
        weight = torch.empty(256, 1, 4, requires_grad=True)
        with Observer() as observer:
            out = torch.nn.functional.conv1d(x, weight, groups=256)
            out.backward(torch.empty_like(out))
    forward = 2 * 256 * 997 * 4
    total = sum(work.flops[torch.float32] for work in observer.work.values())
    assert total == forward + 2 * forward  # the backward pass has the gradients of the input and of the weight
