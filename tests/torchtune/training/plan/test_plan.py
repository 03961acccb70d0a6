import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from torchtune.training import plan_run
from torchtune.training.plan._plan import estimate_memory, optimizer_bytes_per_element

TINY = {
    "_component_": "torchtune.models.llama3_2.llama3_2",
    "vocab_size": 1000,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 128,
    "max_seq_len": 256,
}
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 1e-4}


def settings(**changes) -> SimpleNamespace:
    base = {
        "model": TINY,
        "tokenizer": {"max_seq_len": 128},
        "dtype": "bf16",
        "device": "cpu",
        "batch_size": 2,
        "optimizer": ADAMW,
        "optimizer_precision": "stochastic_rounding",
        "enable_activation_checkpointing": True,
        "loss": {"num_output_chunks": 4},
    }
    return SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize(
    ("optimizer", "dtype", "precision", "expected"),
    [
        (ADAMW, torch.bfloat16, "stochastic_rounding", 4),
        (ADAMW, torch.bfloat16, "param_dtype", 4),
        (ADAMW, torch.bfloat16, "fp32_master", 12),
        (ADAMW, torch.float32, "stochastic_rounding", 8),
        ({"_component_": "torch.optim.SGD", "lr": 1.0}, torch.bfloat16, "stochastic_rounding", 0),
        ({"_component_": "torch.optim.SGD", "lr": 1.0, "momentum": 0.9}, torch.bfloat16, "fp32_master", 8),
        ({"_component_": "torch.optim.Adafactor", "lr": 1.0}, torch.bfloat16, "stochastic_rounding", 1 / 16),
    ],
)
def test_state_of_an_optimizer_by_element(optimizer, dtype, precision, expected):
    assert optimizer_bytes_per_element(optimizer, dtype, precision) == pytest.approx(expected, rel=0.05)


def test_the_text():
    text = plan_run(settings())
    assert "parameters  " in text
    assert "bfloat16" in text
    assert "mesh        1 process, device cpu" in text
    assert "micro-batch 2 x 128 = 256 tokens at most" in text
    assert "2 x 256 = 512 tokens (tokenizer.max_seq_len is not set" in plan_run(settings(tokenizer={}))
    assert "AdamW, stochastic_rounding, 4.0 bytes each" in text
    assert "recomputed in the backward pass" in text
    assert "all kept" in plan_run(settings(enable_activation_checkpointing=False))


def test_weights_in_float32_are_not_rounded():
    assert "AdamW, fp32, 8.0 bytes each" in plan_run(settings(dtype="fp32"))


def test_a_reference_is_a_second_model_unless_adapters_are_left_out():
    preferences = {
        "ref_checkpointer": None,
        "reference_cache": None,
        "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"},
    }
    text = plan_run(settings(**preferences))
    weights = next(line for line in text.splitlines() if line.startswith("  weights"))
    assert f"  reference {weights.removeprefix('  weights   ')}  its weights" in text
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "attn_modules": ["q_proj", "v_proj"]}
    alone = ({"reference_cache": "folder"}, {"loss": {"_component_": "torchtune.rlhf.loss.SimPOLoss"}})
    for changes in (*alone, {"model_converters": [lora]}):
        assert "  reference " not in plan_run(settings(**preferences | changes))


def test_converters_and_what_they_leave_to_train():
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "attn_modules": ["q_proj", "v_proj"]}
    text = plan_run(settings(model_converters=[lora]))
    trained = 2 * (4 * (64 + 64) + 4 * (64 + 32))  # layers, q and v, A and B
    assert f"of which {trained:,} are trained" in text
    assert "converted   LoRA: 4 modules converted" in text


def test_a_recipe_that_does_not_train():
    text = plan_run(SimpleNamespace(model=TINY, dtype="fp32"))
    assert "of weights" in text
    assert "optimizer" not in text


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_of_a_backward_step_are_those_of_the_largest_parameter(in_backward):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 32))
    estimate = estimate_memory(
        model, num_tokens=0, state_bytes=8, checkpointing=False, in_backward=in_backward, num_output_chunks=1
    )
    assert estimate.gradients == 4 * (8 * 32 if in_backward else 8 * 8 + 8 + 8 * 32 + 32)
    assert estimate.total == estimate.weights + estimate.gradients + estimate.optimizer


MEASURE = """
import os, sys, torch
from torchtune import training
from torchtune.training.plan._plan import estimate_memory, optimizer_bytes_per_element

def resident():
    with open("/proc/self/status") as file:
        return [int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:")][0]

adamw = {"_component_": "torch.optim.AdamW", "lr": 1e-4, "fused": True}
def train(layers, width, dtype, precision):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, dtype=dtype) for _ in range(layers)))
    optimizer = training.setup_optimizer(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True), model, precision=precision
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer

train(1, 8, torch.bfloat16, "stochastic_rounding")  # imports what a step needs
for name in sys.argv[1:]:  # each in a process of its own, which has imported everything
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
name, precision = name.split()
dtype = getattr(torch, name)
state_bytes = optimizer_bytes_per_element(adamw, dtype, precision)

small = train(1, 800, dtype, precision)
before = resident()
model, optimizer = train(8, 1100, dtype, precision)
estimate = estimate_memory(
    model, num_tokens=0, state_bytes=state_bytes, checkpointing=False, in_backward=False, num_output_chunks=1
)
print(resident() - before, estimate.total, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_gradients_and_states_grow_as_measured():
    """After a small model, which has paid for what the framework and the scratch memory of a step take."""
    cases = ["bfloat16 stochastic_rounding", "bfloat16 fp32_master", "float32 param_dtype"]
    # Freed memory goes back to the system at once, so that what is resident is what is in use
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    lines = done.stdout.splitlines()
    for case, line in zip(cases, lines, strict=True):
        measured, estimated = map(int, line.split())
        assert measured == pytest.approx(estimated, rel=0.08), case
