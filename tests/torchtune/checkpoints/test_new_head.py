"""The output layer of a classifier that begins from a language model."""

from pathlib import Path

import pytest
import torch

from tests.tiny import write_checkpoint
from torchtune.modules import classifier_model
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA
from torchtune.training import CheckpointError, CheckpointStore


def test_a_new_head_is_trained_or_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    store = CheckpointStore({"policy": {"checkpoint_dir": tmp_path}})
    with torch.device("meta"):
        full, adapted = (
            classifier_model(1, "torchtune.models.from_hf_config", checkpoint_dir=str(tmp_path)) for _ in range(2)
        )
    apply_conversions(adapted, [LoRA(rank=2, alpha=4)])
    store.load_model(full)
    assert full.output.weight.requires_grad
    with pytest.raises(CheckpointError, match="never trained: train all weights"):
        store.load_model(adapted)
