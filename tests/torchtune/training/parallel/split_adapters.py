"""What every rank does: trains split adapters one step, compares it with one device's, and saves them."""

from pathlib import Path

import torch
import torch.distributed as dist

from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import build, randomize_adapter, some_tokens
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA
from torchtune.training import FullModelHFCheckpointer

# Column-wise, row-wise, and both.
TARGETS = {"colwise": ["q_proj", "w1"], "rowwise": ["output_proj", "w2"], "both": ["v_proj", "output_proj", "mlp.w*"]}
CASES = [(targets, dora) for targets in TARGETS for dora in (True, False)]


def lora(targets: str, dora: bool) -> LoRA:
    return LoRA(rank=4, alpha=8, target_modules=TARGETS[targets], use_dora=dora)


def loss_and_gradients(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens, loss_fn = some_tokens(), LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    loss = loss_fn(model.train()(tokens, input_pos=positions), tokens.roll(-1, 1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_as_alone(folder: Path, targets: str, dora: bool) -> None:
    model = ranks.shard(build(folder / "in", lora(targets, dora)), "ours")
    store = FullModelHFCheckpointer(folder / "in", output_dir=folder / f"split {targets} {dora}")
    store.load_model(model)
    randomize_adapter(model)
    loss, gradients = loss_and_gradients(model)
    expected, theirs = torch.load(folder / f"{targets} {dora}.pt")
    assert abs(loss - expected) < 1e-6 * expected
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        difference = (ranks.whole(gradients[name]) - gradient).abs().max() / gradient.abs().max()
        assert difference < 2e-5, f"{targets} {dora}: {name} differs by {difference}"  # of the largest element
    store.save("step_1", model, contents="adapter")
    dist.barrier()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        same_as_alone(folder, *case)
    dist.destroy_process_group()
