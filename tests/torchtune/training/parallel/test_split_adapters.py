"""Adapters under tensor parallelism: losses, gradients and files are those of one device."""

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
import transformers

from tests.torchtune.training.checkpointing import ranks
from tests.torchtune.training.checkpointing.small import (
    build,
    load,
    logits,
    randomize_adapter,
    some_tokens,
    write_folder,
)
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA
from torchtune.training import FullModelHFCheckpointer

# Biases, because the magnitudes of DoRA scale everything but them.
SHAPE = ("Llama", {"attention_bias": True, "mlp_bias": True})
# Column-wise, row-wise, and both.
TARGETS = {"colwise": ["q_proj", "w1"], "rowwise": ["output_proj", "w2"], "both": ["v_proj", "output_proj", "mlp.w*"]}


def lora(targets: str, dora: bool) -> LoRA:
    return LoRA(rank=4, alpha=8, target_modules=TARGETS[targets], use_dora=dora)


def loss_and_gradients(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens, loss_fn = some_tokens(), LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    loss = loss_fn(model.train()(tokens, input_pos=positions), tokens.roll(-1, 1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_as_alone(targets: str, dora: bool) -> Callable[[Path], None]:
    def case(folder: Path) -> None:
        model = ranks.shard(build(folder / "in", lora(targets, dora)), "ours")
        store = FullModelHFCheckpointer(str(folder / "in"), output_dir=str(folder / f"split {targets} {dora}"))
        store.load_model(model)
        randomize_adapter(model)
        loss, gradients = loss_and_gradients(model)
        expected, theirs = torch.load(folder / f"{targets} {dora}.pt")
        assert abs(loss - expected) < 1e-6 * expected
        assert gradients.keys() == theirs.keys()
        for name, gradient in theirs.items():
            difference = (ranks.whole(gradients[name]) - gradient).abs().max() / gradient.abs().max()
            assert difference < 2e-5, f"{case.__name__}: {name} differs by {difference}"  # of the largest element
        store.save("step_1", model, contents="adapter")
        dist.barrier()

    case.__name__ = f"{targets} {dora}"
    return case


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_a_split_adapter_is_that_of_one_device(tmp_path: Path) -> None:
    cases = [(targets, dora) for targets in TARGETS for dora in (True, False)]
    write_folder(tmp_path / "in", SHAPE, num_hidden_layers=2)
    wanted = {}
    for targets, dora in cases:
        model = load(tmp_path / "in", lora(targets, dora))
        randomize_adapter(model)
        wanted[targets, dora] = logits(model)
        torch.save(loss_and_gradients(model), tmp_path / f"{targets} {dora}.pt")
    ranks.run(2, [same_as_alone(*case) for case in cases], tmp_path)
    for targets, dora in cases:
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / f"split {targets} {dora}" / "step_1").eval()
        torch.testing.assert_close(logits(theirs), wanted[targets, dora], rtol=1e-4, atol=1e-4)


def test_dropout_is_refused_before_the_run(tmp_path: Path) -> None:
    from torchtune.modules.parallel._styles import ParallelError
    from torchtune.training import ParallelDims
    from torchtune.training.parallel._parallelize import check_split

    write_folder(tmp_path / "in", SHAPE, num_hidden_layers=2)
    model = build(tmp_path / "in", LoRA(4, 8, dropout=0.1, use_dora=True))
    with pytest.raises(ParallelError, match="set lora_dropout to 0"):
        check_split(model, ParallelDims(tp=2, world_size=2))
