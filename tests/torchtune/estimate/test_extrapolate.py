"""A step extrapolated from few layers takes the memory, FLOPs and traffic of a step with all layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import tiny_images
from tests.recipes.runs import load_recipe, write_config
from tests.torchtune.estimate.measured import FULL, FULL_MANY, LORA, LORA_MANY
from tests.torchtune.models.families import PUBLISHED
from torchtune.config import load_and_check
from torchtune.estimate import estimate_run
from torchtune.estimate._extrapolate import Estimate, choose_layers
from torchtune.estimate._ledger import Ledger, highest_by_phase
from torchtune.estimate._simulate import simulate

ADAPTER = {"_component_": "torchtune.modules.peft.LoRA", "rank": 8, "alpha": 16}
QUANTIZED = {"_component_": "torchtune.modules.low_precision.QuantizeBase", "block_size": 64}
RECOMPUTE = {"enable_activation_checkpointing": True}
DENSE = "llama3_2_1b"
WINDOWS = "gemma3_1b"
EXPERTS = "glm4_5_air"
HYBRID = "qwen3_next_80b_a3b"
# Model, layers, recipe, processes, settings.
CASES: dict[str, tuple[str, int, str, int, dict[str, Any]]] = {
    "full": (DENSE, 8, FULL, 1, {}),
    "qlora": (DENSE, 8, LORA, 1, {"model_converters": [QUANTIZED, ADAPTER], **RECOMPUTE}),
    "in backward": (DENSE, 8, FULL, 1, {"optimizer_in_bwd": True}),
    "accumulated, fsdp": (DENSE, 10, FULL_MANY, 8, {"gradient_accumulation_steps": 4, **RECOMPUTE}),
    "every second layer recomputed": (DENSE, 13, FULL, 1, {"ac_mode": "selective", "ac_option": 2}),
    "lora, tp": (DENSE, 10, LORA_MANY, 8, {"model_converters": [ADAPTER], "tensor_parallel_dim": 2}),
    "windows": (WINDOWS, 14, LORA, 1, {"model_converters": [ADAPTER]}),
    "dense and experts, fsdp": (EXPERTS, 12, LORA_MANY, 8, {"model_converters": [ADAPTER], **RECOMPUTE}),
    "hybrid lora": (HYBRID, 16, LORA, 1, {"model_converters": [ADAPTER]}),
    "hybrid experts, fsdp": (HYBRID, 16, FULL_MANY, 8, RECOMPUTE),
    "image windows": ("qwen2_5_vl", 20, FULL, 1, {}),
    "images of several depths, fsdp": ("qwen3_vl", 24, FULL_MANY, 8, RECOMPUTE),
    "offloaded": (DENSE, 10, FULL_MANY, 8, {"fsdp_cpu_offload": True, **RECOMPUTE}),
}


def describe(model: str, layers: int) -> dict[str, Any]:
    """``config.json``; of models with a vision tower, half of the layers are there."""
    if model in PUBLISHED:
        return PUBLISHED[model] | {"num_hidden_layers": layers}
    config = tiny_images.CONFIGS[model]()
    config.text_config.num_hidden_layers = config.vision_config.depth = layers // 2
    config.text_config.max_position_embeddings = 4096
    config.text_config.layer_types = ["full_attention"] * (layers // 2)
    return config.to_dict() | {"architectures": [type(config).__name__.replace("Config", "ForConditionalGeneration")]}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """What makes recipe_main and its settings."""

    def loaded(model: str, layers: int, recipe: str, settings: dict[str, Any], length: int = 2048) -> tuple[Any, Any]:
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(describe(model, layers)))
        main = load_recipe(recipe, tmp_path).recipe_main
        config = write_config(recipe, tmp_path, tmp_path / "never", dtype="bf16", **settings)
        return main, load_and_check(config, [f"tokenizer.max_seq_len={length}"], main)

    return loaded


def flops(estimate: Estimate) -> dict[str, float]:
    return {phase: sum(work.flops.values()) for phase, work in estimate.work.items()}


def sent(estimate: Estimate) -> float:
    return sum(sum((work.sent + work.awaited).values()) for work in estimate.work.values())


@pytest.mark.parametrize("name", CASES)
def test_few_layers_give_the_estimate_of_all(name, load):
    model, layers, recipe, processes, settings = CASES[name]
    main, cfg = load(model, layers, recipe, settings)
    few, complete = (estimate_run(main, cfg, processes, whole=every) for every in (False, True))
    assert sum(few.simulated) < layers == complete.layers
    assert few.peak == pytest.approx(complete.peak, rel=0.01)
    for phase, peak in complete.peaks.items():
        # The optimizer's is the larger of two peaks, of norms and of steps, which grow differently with the layers.
        tolerance = 0.02 if phase == "optimizer" else 0.01
        assert few.peaks[phase].total == pytest.approx(peak.total, rel=tolerance), phase
    assert flops(few) == pytest.approx(flops(complete), rel=1e-6)
    assert sent(few) == pytest.approx(sent(complete), rel=1e-3)
    assert few.host == pytest.approx(complete.host, rel=0.01)
    assert few.parameters == complete.parameters


def test_activations_that_wait_for_their_copies_are_not_extrapolated(load: Callable[..., tuple[Any, Any]]) -> None:
    """The inputs of a few layers wait on the device; those of more layers do not take more memory."""
    settings = {"enable_activation_offloading": True, "device": "cuda", **RECOMPUTE}
    main, cfg = load(DENSE, 20, FULL, settings, length=65_536)
    few, complete = (estimate_run(main, cfg, whole=every) for every in (False, True))
    assert sum(few.simulated) < 20
    for phase, peak in complete.peaks.items():
        assert few.peaks[phase].total == pytest.approx(peak.total, rel=0.01), phase
    assert few.host == pytest.approx(complete.host, rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "bits", "block_size"), [("AdamW8bit", 8, 256), ("AdamW4bit", 4, 128), ("AdamWFp8", 8, 256)]
)
def test_states_of_low_bit_optimizers_have_their_size(
    optimizer: str, bits: int, block_size: int, load: Callable[..., tuple[Any, Any]]
) -> None:
    """Two states of ``bits`` per element, with a scale in fp32 for each block."""
    settings = {"optimizer": {"_component_": f"torchao.optim.{optimizer}", "lr": 1e-5}}
    main, cfg = load(DENSE, 2, FULL_MANY, settings, length=256)
    estimate = estimate_run(main, cfg, 8, whole=True)
    expected = estimate.parameters[0] / 8 * 2 * (bits / 8 + 4 / block_size)
    assert estimate.peaks["optimizer"].components["optimizer"] == pytest.approx(expected, rel=0.01)


def test_offloaded_shards_are_copied_to_the_device_and_their_gradients_back(
    load: Callable[..., tuple[Any, Any]],
) -> None:
    main, cfg = load(DENSE, 10, FULL_MANY, {"fsdp_cpu_offload": True, **RECOMPUTE})
    estimate = estimate_run(main, cfg, 8)
    shard, embedding = (count / 8 for count in (estimate.parameters[0], 128_256 * 2048))
    twice = 2 * (2 * shard - embedding)  # bytes in bf16, for both passes; the root module stays gathered
    copied = sum(work.hosted["bytes"] for work in estimate.work.values())
    assert copied == pytest.approx(twice + 4 * shard, rel=0.02)  # gradients are summed in fp32


@pytest.mark.parametrize(("recipe", "processes"), [(FULL, 1), (FULL_MANY, 8)])
def test_one_micro_batch_and_step_give_the_estimate_of_all(recipe, processes, load):
    main, cfg = load(DENSE, 2, recipe, {"gradient_accumulation_steps": 3, "batch_size": 1}, length=256)
    single, complete = (
        simulate(main, cfg, processes, micro_batches=most, steps=steps) for most, steps in ((1, 1), (None, 2))
    )
    peaks, wanted = (highest_by_phase(run.ledger.peaks()) for run in (single, complete))
    for phase, peak in wanted.items():
        assert peaks[phase].total == pytest.approx(peak.total, rel=1e-3), phase
        assert single.work[0, phase].flops == complete.work[1, phase].flops


def test_optimizer_states_count_from_the_set_up_on():
    ledger = Ledger()
    state = torch.empty(1024)
    parameter = torch.empty(1024)
    ledger.add(parameter.untyped_storage(), "parameters", "kept", "here")
    ledger.enter("forward")
    activation = torch.empty(1024)
    ledger.add(activation.untyped_storage(), "activations", "other", "here")
    ledger.enter("optimizer")
    ledger.add(state.untyped_storage(), "other", "state", "here")
    ledger.end_step()
    peaks = highest_by_phase(ledger.peaks())
    assert [peaks[phase].total for phase in ("set-up", "forward", "optimizer")] == [4096, 3 * 4096, 3 * 4096]


def chosen(kinds: str, **more: Any) -> list[tuple[float, str]]:
    """Weights, and the layers that are kept."""
    layers = nn.ModuleList(nn.Linear(1, "abc".index(kind) + 1) for kind in kinds)
    model = nn.Module()
    model.layers = layers
    choices = choose_layers({"model": model}, **more)
    return [
        (weight, " ".join(map(str, kept_layers.get(("model", "text"), ["all"])))) for weight, kept_layers in choices
    ]


def test_simulated_layers_are_the_fewest_that_show_all_kinds():
    assert chosen("a" * 32) == [(-29, "0 31"), (30, "0 1 31")]
    assert chosen("a" * 32, ends=2) == [(-27, "0 1 30 31"), (28, "0 1 2 30 31")]
    assert chosen("b" + "a" * 9) == [(-7, "0 9"), (8, "0 1 9")]
    assert chosen("bbb" + "a" * 16) == [(-14, "0 1 2 18"), (15, "0 1 2 3 18")]
    assert chosen("aaab" * 8) == [(-6, "0 1 30 31"), (7, "0 1 2 3 4 5 30 31")]  # 22 and 7 are omitted
    assert chosen("a" * 15, group=2) == [(-4, "0 1 12 13 14"), (5, "0 1 2 3 12 13 14")]
    assert chosen("abba") == chosen("aa") == [(1, "all")]


def test_layers_of_all_models_are_extrapolated_at_once() -> None:
    def model(layers: int) -> nn.Module:
        module = nn.Module()
        module.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(layers))
        return module

    def counts(kept) -> dict[str, int]:
        return {name: len(layers) for (name, _), layers in kept.items()}

    first_choice, second_choice = choose_layers({"model": model(22), "teacher": model(42)})
    assert (first_choice[0], counts(first_choice[1])) == (-19, {"model": 2, "teacher": 2})
    assert (second_choice[0], counts(second_choice[1])) == (20, {"model": 3, "teacher": 4})
