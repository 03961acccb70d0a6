"""Compare LoRA of experts with peft on transformers' model, on a CPU: CPU time of a step, and the gradients.

    python benchmarks/compare_peft_experts.py             # 4 layers of 128 experts, 8 per token, 2 rows of 256 tokens
    python benchmarks/compare_peft_experts.py --tiny      # the same code on a small model, to see that it runs

Both sides load the same random Qwen 3 mixture in float32, adapt the experts only, and compute the same loss of the same
tokens, without recomputing layers. A step is a forward and a backward pass and a step of AdamW. The sides take turns in
one process; times are the shortest, and the ratio is the median of the ratios of turns.

peft wraps the stacked weights (``target_parameters``) and adds its delta to the weights of all experts. Its adapter of
gate and up shares one A; here gate and up have an adapter each, which start with the same A, so that the gradient of
peft's A is the sum of both.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.models import from_hf_config
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA

RANK = 8
ALPHA = 16


def write_checkpoint(
    folder: Path, width: int, layers: int, experts: int, experts_per_token: int, expert_width: int
) -> None:
    """Save a random model of transformers."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=width,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=expert_width,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        initializer_range=0.1,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def load_library_model(folder: Path) -> nn.Module:
    """Load the library's model with adapters of its experts."""
    with torch.device("meta"):
        model = from_hf_config(folder)
        apply_conversions(model, [LoRA(rank=RANK, alpha=ALPHA, target_modules=["experts"])])
    FullModelHFCheckpointer(str(folder), output_dir=str(folder / "output")).load_model(model)
    return model.train()


def load_peft_model(folder: Path) -> nn.Module:
    """Load transformers' model and wrap the stacked weights of its experts."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=targets)
    return peft.get_peft_model(model, config).train()


def adapters_in_peft(model: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return peft's parameters of each layer."""
    layers = []
    for layer in model.get_base_model().model.layers:
        of_down = layer.mlp.experts  # it wraps that of gate and up
        of_gate_up = of_down.base_layer
        layers.append(
            {
                "gate_up_a": of_gate_up.lora_A["default"].weight,
                "gate_up_b": of_gate_up.lora_B["default"].weight,
                "down_a": of_down.lora_A["default"].weight,
                "down_b": of_down.lora_B["default"].weight,
            }
        )
    return layers


def a_by_expert(a: Tensor) -> Tensor:
    """Convert peft's A ``[e r, i]`` to ``[e, i, r]``."""
    return a.unflatten(0, (-1, RANK)).transpose(1, 2)


def b_by_expert(b: Tensor) -> Tensor:
    """Convert peft's B ``[o, r e]`` to ``[e, r, o]``."""
    return b.unflatten(1, (RANK, -1)).permute(2, 1, 0)


@torch.no_grad()
def copy_adapters(peft_model: nn.Module, model: nn.Module) -> None:
    """Give both models the same random adapters."""
    for peft_adapters, layer in zip(adapters_in_peft(peft_model), model.layers, strict=True):
        for adapter in peft_adapters.values():
            adapter.normal_(std=0.05)
        experts = layer.mlp.experts
        experts.lora_gate_a.copy_(a_by_expert(peft_adapters["gate_up_a"]))
        experts.lora_up_a.copy_(a_by_expert(peft_adapters["gate_up_a"]))
        gate_b, up_b = b_by_expert(peft_adapters["gate_up_b"]).chunk(2, dim=2)
        experts.lora_gate_b.copy_(gate_b)
        experts.lora_up_b.copy_(up_b)
        experts.lora_down_a.copy_(a_by_expert(peft_adapters["down_a"]))
        experts.lora_down_b.copy_(b_by_expert(peft_adapters["down_b"]))


def largest_difference(peft_model: nn.Module, model: nn.Module) -> float:
    """Return the largest difference of the gradients of an adapter, relative to its norm."""
    differences = []
    for peft_adapters, layer in zip(adapters_in_peft(peft_model), model.layers, strict=True):
        experts = layer.mlp.experts
        pairs = [
            (a_by_expert(peft_adapters["gate_up_a"].grad), experts.lora_gate_a.grad + experts.lora_up_a.grad),
            (
                b_by_expert(peft_adapters["gate_up_b"].grad),
                torch.cat([experts.lora_gate_b.grad, experts.lora_up_b.grad], dim=2),
            ),
            (a_by_expert(peft_adapters["down_a"].grad), experts.lora_down_a.grad),
            (b_by_expert(peft_adapters["down_b"].grad), experts.lora_down_b.grad),
        ]
        for peft_gradient, gradient in pairs:
            differences.append(((peft_gradient - gradient).norm() / peft_gradient.norm()).item())
    return max(differences)


def peft_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute logits with transformers' model."""
    return model(input_ids=tokens, use_cache=False).logits


def compute_gradients(logits: Callable[[Tensor], Tensor], tokens: Tensor) -> float:
    """Run a forward and a backward pass and return the loss."""
    loss = F.cross_entropy(logits(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()


def measure_step(logits: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Run a step and return its seconds."""
    start = time.process_time()
    compute_gradients(logits, tokens)
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start


def compare(folder: Path, tokens: Tensor, turns: int) -> dict[str, Any]:
    """Compare both sides on the checkpoint in ``folder``."""
    model = load_library_model(folder)
    peft_model = load_peft_model(folder)
    copy_adapters(peft_model, model)
    sides = {"torchtune": (model, model), "transformers + peft": (partial(peft_logits, peft_model), peft_model)}

    losses = {name: compute_gradients(logits, tokens) for name, (logits, _) in sides.items()}
    difference = largest_difference(peft_model, model)
    optimizers = {}
    for name, (_, module) in sides.items():
        module.zero_grad()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizers[name] = torch.optim.AdamW(trained, lr=1e-4)

    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, (logits, _) in sides.items():
            seconds = measure_step(logits, optimizers[name], tokens)
            if turn > 0:  # the first warms up
                times[name].append(seconds)
    ratios = [peft / own for own, peft in zip(*times.values(), strict=True)]
    return {
        "losses": losses,
        "difference": difference,
        "seconds": {name: min(values) for name, values in times.items()},
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--experts", type=int, default=128, help="experts of a layer; each token chooses a sixteenth")
    parser.add_argument("--length", type=int, default=256, help="tokens of each of the two rows")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = {
        "width": 256,
        "layers": 4,
        "experts": arguments.experts,
        "experts_per_token": arguments.experts // 16,
        "expert_width": 192,
    }
    length = arguments.length
    if arguments.tiny:
        sizes = {"width": 32, "layers": 1, "experts": 4, "experts_per_token": 2, "expert_width": 16}
        length = 16
    tokens = torch.randint(0, 512, (2, length))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), **sizes)
        result = compare(Path(folder), tokens, arguments.turns)
    for name, seconds in result["seconds"].items():
        print(f"{name:20} loss {result['losses'][name]:.6f}, {1e3 * seconds:.0f} ms per step")
    print(f"largest relative difference of gradients {result['difference']:.1e}")
    print(f"transformers + peft takes {result['ratio']:.2f} times as long")


if __name__ == "__main__":
    main()
