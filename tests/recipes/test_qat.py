"""What recipes of quantization-aware training promise besides the contract of those that they were copied from."""

import pytest
import torch

from tests.recipes import checks
from tests.recipes.runs import QAT, resume, start
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.models import from_hf_config
from torchtune.modules.conversion import ConversionError
from torchtune.training.quantization import Int8DynActInt4WeightQATQuantizer
from torchtune.utils import UserError

ALONE = [name for name in QAT if name.endswith("single_device")]
TOKENS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("name", ALONE)
def test_the_exported_quantised_model_computes_what_was_trained(name, tmp_path):
    """``transformers`` runs the quantized export, int8 inputs and all."""
    from transformers import AutoModelForCausalLM

    run = start(name, tmp_path, max_steps_per_epoch=3)
    run.recipe.model.eval().cpu()
    hf_model = AutoModelForCausalLM.from_pretrained(run.output_dir / "quantized", dtype=torch.float32)
    with torch.no_grad():
        logits = run.recipe.model(TOKENS)
        assert torch.allclose(hf_model(TOKENS).logits, logits, atol=1e-4)
    (saved,) = run.output_dir.glob("epoch_*")
    with torch.device("meta"):
        full_model = from_hf_config(saved)
    FullModelHFCheckpointer(str(saved)).load_model(full_model)
    with torch.no_grad():
        assert not torch.allclose(full_model(TOKENS), logits, atol=1e-2), "it was trained for the quantized model"
        converted = Int8DynActInt4WeightQATQuantizer(groupsize=16).prepare(full_model)
        assert torch.equal(converted(TOKENS), logits), "the plain export is what is quantized"
    assert (run.output_dir / "quantized" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ALONE)
def test_delayed_fake_quantisation_survives_a_resume(name, tmp_path):
    """Bit for bit the recipe without it, until it begins; resumed before and after that, bit for bit the same."""
    plain = start(name.replace("qat_lora", "lora").replace("qat_single", "full_finetune_single"), tmp_path)
    settings = {"fake_quant_after_n_steps": 5, "save_every_n_steps": 4}
    later = start(name, tmp_path, **settings)
    losses = [plain.losses[step] == later.losses[step] for step in plain.losses]
    assert losses[:5] == [True] * 5
    assert not any(losses[5:])
    for step in (4, 8):
        resume(name, tmp_path, later, step, **settings)


def test_splitting_the_work_changes_nothing(tmp_path):
    checks.split_changes_nothing(
        "qat_single_device",
        tmp_path,
        {"batch_size": 4},
        {"batch_size": 2, "gradient_accumulation_steps": 2},
        {"batch_size": 4, "enable_activation_checkpointing": True, "optimizer_in_bwd": True},
    )


def test_fake_quantization_after_the_last_step_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="is 12, but the run ends after 12 steps"):
        start("qat_single_device", tmp_path, fake_quant_after_n_steps=12)


def test_start_of_fake_quantization_without_a_quantizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="fake_quant_after_n_steps: needs a quantizer"):
        start("full_finetune_single_device", tmp_path, train=False, fake_quant_after_n_steps=3)
