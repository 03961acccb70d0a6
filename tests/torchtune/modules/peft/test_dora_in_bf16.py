"""DoRA over bfloat16 weights changes nothing before its first step, and its small steps count."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import build, load, logits, some_tokens, write_folder
from torchtune import training
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.modules.peft import LoRA, get_adapter_params

BF16 = torch.bfloat16


def dora(dropout: float = 0.0) -> LoRA:
    return LoRA(4, 8, dropout=dropout, apply_to_mlp=True, use_dora=True)


@pytest.mark.parametrize("shape", ["llama", "qwen2"])  # without biases, and with
def test_model_with_new_dora_adapters_is_its_base(shape, tmp_path):
    source = write_folder(tmp_path / "in", shape, BF16)
    base = logits(load(source, dtype=BF16))
    model = load(source, dora(dropout=0.3), dtype=BF16)
    assert {p.dtype for p in get_adapter_params(model).values()} == {torch.float32}
    assert torch.equal(logits(model), base)
    assert torch.equal(logits(model.train()), base)


@pytest.mark.parametrize("precision", ["stochastic_rounding", "fp32_master", "param_dtype"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_small_steps_of_magnitudes_count(precision, in_backward, tmp_path):
    """SGD in float64 by hand; to the nearest bfloat16 most of these steps would be none."""
    model = load(write_folder(tmp_path / "in", "llama", BF16), dora(), dtype=BF16).train()
    before = {name: p.detach().double() for name, p in get_adapter_params(model).items()}
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in get_adapter_params(model).items():
        parameter.register_hook(lambda grad, name=name: gradients.__setitem__(name, grad.double()))
    optimizer = training.setup_optimizer(
        lambda parameters: torch.optim.SGD(parameters, lr=1e-5), model, precision=precision, in_backward=in_backward
    )
    model(some_tokens()).float().logsumexp(-1).mean().backward()
    optimizer.step()
    magnitudes = {name: p for name, p in get_adapter_params(model).items() if name.endswith("magnitude")}
    assert len(magnitudes) == 21
    for name, parameter in magnitudes.items():
        expected = before[name] - 1e-5 * gradients[name]
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-7, atol=0)


def one_step(model: nn.Module, share: int = 1) -> dict[str, torch.Tensor]:
    """Values after one step of SGD; ``share`` processes do the same work and add their gradients."""
    optimizer = training.setup_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1), model)
    (model.train()(some_tokens()).float().logsumexp(-1).mean() / share).backward()
    optimizer.step()
    return {name: ranks.whole(parameter) for name, parameter in get_adapter_params(model).items()}


def sharded(folder: Path) -> None:
    model = ranks.shard(build(folder / "in", dora(), dtype=BF16), "data")
    FullModelHFCheckpointer(str(folder / "in")).load_model(model)
    alone = load(folder / "in", dora(), dtype=BF16)
    with torch.no_grad():  # drawn apart
        for name, parameter in get_adapter_params(alone).items():
            parameter.copy_(ranks.whole(model.get_parameter(name)))
    assert torch.equal(logits(model.eval()), logits(load(folder / "in", dtype=BF16)))
    sharded_step, step = one_step(model, dist.get_world_size()), one_step(alone)
    for name, value in step.items():
        torch.testing.assert_close(sharded_step[name], value, rtol=1e-4, atol=1e-5)


def test_sharded_dora_starts_and_steps_as_on_one_process(tmp_path):
    write_folder(tmp_path / "in", "llama", BF16)
    ranks.run(2, [sharded], tmp_path)
