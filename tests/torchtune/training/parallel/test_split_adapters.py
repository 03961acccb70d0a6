"""Adapters under tensor parallelism: losses, gradients and files are those of one device."""

import peft
import pytest
import torch
import transformers

from tests.recipes.killing import launch
from tests.torchtune.checkpoints.small import (
    build,
    load,
    logits,
    randomize_adapter,
    write_folder,
)
from tests.torchtune.training.parallel.split_adapters import CASES, lora, loss_and_gradients
from torchtune.modules.peft import LoRA

# Biases, because the magnitudes of DoRA scale everything but them.
SHAPE = ("Llama", {"attention_bias": True, "mlp_bias": True})


def test_a_split_adapter_is_that_of_one_device(tmp_path):
    write_folder(tmp_path / "in", SHAPE, num_hidden_layers=2)
    wanted = {}
    for targets, dora in CASES:
        model = load(tmp_path / "in", lora(targets, dora))
        randomize_adapter(model)
        wanted[targets, dora] = logits(model)
        torch.save(loss_and_gradients(model), tmp_path / f"{targets} {dora}.pt")
    launch("training.parallel.split_adapters", 2, tmp_path)  # not forked from here, where autograd may have threads
    for targets, dora in CASES:
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / f"split {targets} {dora}" / "step_1").eval()
        torch.testing.assert_close(logits(theirs), wanted[targets, dora], rtol=1e-4, atol=1e-4)


def test_dropout_is_refused_before_the_run(tmp_path):
    from torchtune.modules.parallel._styles import ParallelError
    from torchtune.training import ParallelDims
    from torchtune.training.parallel import check_parallelizable

    write_folder(tmp_path / "in", SHAPE, num_hidden_layers=2)
    model = build(tmp_path / "in", LoRA(4, 8, dropout=0.1, use_dora=True))
    with pytest.raises(ParallelError, match="set lora_dropout to 0"):
        check_parallelizable(model, ParallelDims(tp=2, world_size=2))
