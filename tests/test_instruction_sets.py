"""bf16 in generation, evaluation and rollouts, on processors with and without instructions for it."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchtune
from tests.recipes.runs import start
from tests.tiny import write_checkpoint
from torchtune import evaluation
from torchtune.generation import fast_linears, generate_tokens
from torchtune.utils import onednn_computes

ROOT = Path(__file__).parents[1]
# Limits of ATen's kernels and of oneDNN, which has no setting below SSE4.1.
INSTRUCTION_SETS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
LIMITED = "TUNE_TESTS_INSTRUCTIONS"  # tells the tests that run under a limit which one it is
# Products, their gradients, and the choice of a dtype; generation and weights in their fast layout are what is below.
KERNELS = [
    "tests/torchtune/modules/kernels/test_onednn.py::test_a_product_of_any_strides_equals_float64",
    "tests/torchtune/modules/kernels/test_onednn.py::test_a_layer_inside_and_its_gradients_equal_float64",
    "tests/torchtune/training/test_precision.py::test_default_dtype_is_one_that_the_cpu_computes_fast",
]
MORE = {
    "avx2": [
        "tests/torchtune/generation/test_continuous_batch.py::test_answers_are_the_same_while_rows_join_and_leave",
        "tests/torchtune/generation/test_continuous_batch.py::test_weights_return_from_their_fast_layout",
        "tests/torchtune/generation/test_continuous_batch.py::test_fast_layers_apply_hooks_and_autocast_to_their_input",
        "tests/torchtune/generation/test_continuous_batch.py::test_successive_prompts_of_other_lengths_work_under_autocast",
        "tests/torchtune/generation/test_tokens.py::test_greedy_equals_transformers",
    ],
    "default": [],
}
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [7] * 40]


def processor_has_more_than_avx2():
    """Whether kernels for more than AVX2 exist on this processor, in ATen (AVX512) or in oneDNN (VNNI, too)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return True
    return any(name in cpuinfo.read_text() for name in ("avx512", "avx_vnni", "avx10", "amx"))


def test_a_model_in_bf16_answers(tmp_path):
    if limit := os.environ.get(LIMITED):
        assert torch.backends.cpu.get_cpu_capability() == limit.upper()
        assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    model, tokenizer = torchtune.load(write_checkpoint(tmp_path / "checkpoint"), dtype="bf16", device="cpu")
    weight = model.layers[0].attn.q_proj.weight
    for pack in (True, False):
        with torch.no_grad(), fast_linears(model, pack=pack):
            assert (weight.numel() == 0) == (pack and onednn_computes(torch.bfloat16))
            assert len(torchtune.generate(model, tokenizer, ["the cat sees", "a"], max_new_tokens=4)) == 2
    generated = generate_tokens(model, PROMPTS, max_new_tokens=40, temperature=0.0)
    for prompt, tokens, log_probs in zip(PROMPTS, generated.tokens, generated.log_probs, strict=True):
        assert len(tokens) == 40
        with torch.no_grad():
            logits = model.float()(torch.tensor([[*prompt, *tokens.tolist()]]))[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(log_probs.float(), expected, rtol=0, atol=0.1)  # bf16 has 8 bits
        model.bfloat16()


def test_a_model_in_bf16_is_evaluated(tmp_path):
    model, tokenizer = torchtune.load(write_checkpoint(tmp_path / "checkpoint"), dtype="bf16", device="cpu")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the cat", "answer": "sees"}')
    rows = evaluation.read_eval_rows(tmp_path / "rows.jsonl")
    scores = evaluation.make_scores(["exact"])
    report = evaluation.evaluate_answers(
        model, tokenizer, rows, scores, source="rows.jsonl", folder=tmp_path, max_new_tokens=40
    )
    assert report.mean("exact")[0] in (0.0, 1.0)


def test_rollouts_in_bf16(tmp_path):
    run = start("lora_grpo_single_device", tmp_path, dtype="bf16", max_steps_per_epoch=2)
    assert list(run.losses) == [1, 2]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the names are those of x86")
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_kernels_hold_with_fewer_instructions(instructions, tmp_path):
    if instructions == "avx2" and not processor_has_more_than_avx2():
        pytest.skip("this processor has no more than AVX2: all tests have run so")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        f"--basetemp={tmp_path / 'tests'}",
        "-m",
        "not slow",
    ]
    environment = {**os.environ, **INSTRUCTION_SETS[instructions], LIMITED: instructions}
    done = subprocess.run(
        [*command, *KERNELS, *MORE[instructions], Path(__file__).relative_to(ROOT)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-5000:]
