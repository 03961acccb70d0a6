"""The benchmark that needs a GPU is tried where there is none, with tiny shapes."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("bench_gpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what transformers and the profiler say of themselves
@pytest.mark.parametrize(
    ("case", "side", "kinds"),
    [
        ("qwen3-30b-a3b-lora", "ours", {"MultiHeadAttention", "MoE"}),
        ("qwen3.5-9b-8-layers-full", "ours", {"GatedDeltaNet", "MultiHeadAttention", "FeedForward"}),
        ("qwen3-4b-grpo-lora", "ours", {"MultiHeadAttention", "FeedForward"}),
        ("qwen3-30b-a3b-lora", "transformers", set()),
        ("qwen3-4b-grpo-lora", "transformers", set()),
    ],
)
def test_every_stage_of_a_case_is_timed(bench, case, side, kinds, capsys):
    arguments = {"case": case, "side": side, "tiny": True, "compile": None, "steps": 1, "warmup": 1}
    bench.measure(argparse.Namespace(**arguments, precision="stochastic_rounding", peak_tflops=None))
    results = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("RESULT "):
            results |= json.loads(line.removeprefix("RESULT "))
    eager = results["eager"]
    assert min(eager["tokens_per_second"], eager["peak_gib"], eager["train_seconds"], results["trained"]) > 0
    assert ("generate_seconds" in eager) == ("grpo" in case)
    if side == "ours":
        times = results["kernels_ms"]
        expected_kinds = kinds | {"optimizer", "Embedding", "RMSNorm", "loss and others"}
        assert set(times) == expected_kinds
        # The backward pass belongs to layers too.
        assert sum(times[kind] for kind in kinds) > times["loss and others"]


def test_flops_of_a_llama_are_those_of_the_formula(bench):
    """Against the sum by hand: 7 products a layer, attention in each document, and the output."""
    import torch
    from gpu_cases import RANK, draw_step, needed_flops
    from gpu_sides import build_ours

    case = bench.CASES["llama-8b-lora"].shrunk()
    model = build_ours(case, True, torch.device("meta"))
    batch = draw_step(case, 512, 0)
    d = 64
    ffn = 128
    q = 64
    kv = 32
    layers = 4
    shapes = [(d, q), (d, kv), (d, kv), (q, d), (d, ffn), (d, ffn), (ffn, d)]
    tokens = 256
    labels = tokens - len(batch.documents.lengths)
    weights = sum(inputs * outputs for inputs, outputs in shapes)
    adapters = sum(RANK * (inputs + outputs) for inputs, outputs in shapes)
    products = 4 * (layers * weights * tokens + 512 * d * labels) + 6 * layers * adapters * tokens
    pairs = sum(n * (n + 1) // 2 for n in batch.documents.lengths)
    assert needed_flops(model.description, model, True, batch) == products + 12 * layers * q * pairs


def test_missing_gpu_is_refused(bench, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "llama-8b-lora", "ours"])
    with pytest.raises(SystemExit, match="There is no CUDA device"):
        bench.main()
