"""Every family's adapters are PEFT's, both ways through files."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtune.models import ModelError, from_hf_config
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA, get_adapter_params
from torchtune.modules.peft._utils import MIXER_INPUTS, STANDS_FOR
from torchtune.training import FullModelHFCheckpointer

pytestmark = [
    # peft asks transformers under an older name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
ATTENTION = ("output_proj", *MIXER_INPUTS, *(name for names in STANDS_FOR.values() for name in names))
PARTS = (*ATTENTION, "w1", "w2", "w3")
TOKENS = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(1))


def adaptable(model: TransformerDecoder) -> list[str]:
    """The layers whose adapters the family can save, by path: attention and MLP.

    In a model with experts, peft takes every feed-forward for theirs; these have a test among the checkpoints'.
    """
    parts = ATTENTION if model.description.num_experts else PARTS
    found = []
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path.rpartition(".")[2] in parts:
            try:
                model.spec.check_adapters([path], model.description)
            except ModelError:
                continue
            found.append(path)
    return found


def test_experts_in_one_tensor_take_no_adapters_and_the_mlp_beside_them_does() -> None:
    from torchtune.models.gemma4 import gemma4_26b_a4b, lora_gemma4_26b_a4b

    with torch.device("meta"):
        with pytest.raises(ModelError, match=r"hold all experts in one tensor.*set apply_lora_to_mlp to False"):
            lora_gemma4_26b_a4b(["q_proj"], apply_lora_to_mlp=True)
        (report,) = apply_conversions(gemma4_26b_a4b(), [LoRA(rank=2, target_modules=["*.shared_expert.w1"])])
    assert report.num_parameters == 30 * 2 * (2816 + 2112)


def test_what_peft_refuses_has_no_adapter_and_the_report_says_so() -> None:
    from torchtune.models.nemotron_h import nemotron3_nano_30b_a3b

    with torch.device("meta"):
        model = nemotron3_nano_30b_a3b()
    with pytest.raises(ModelError, match=r"'layers.0.attn.output_proj': peft adapts no such module of nemotron_h"):
        LoRA(target_modules=["output_proj"]).convert(model)
    report = LoRA(attn_modules=["q_proj", "output_proj"]).convert(model)
    assert "none for layers.0.attn.output_proj and its like (23), which peft refuses" in report.note
    outputs = [path for path in report.replaced if path.endswith("output_proj")]
    assert outputs == [f"layers.{i}.attn.output_proj" for i in model.description.attn_layers]


def load(folder: Path, output: Path, conversion: LoRA) -> tuple[FullModelHFCheckpointer, TransformerDecoder]:
    """Base and, where the folder has one, adapter."""
    with torch.device("meta"):
        model = from_hf_config(folder)
        apply_conversions(model, [conversion])
    checkpointer = FullModelHFCheckpointer(str(folder), output_dir=str(output))
    checkpointer.load_model(model)
    return checkpointer, model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


def test_adapters_go_both_ways_through_files(pair: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    source = tmp_path / "base"
    shutil.copytree(pair.folder, source)
    conversion = LoRA(rank=3, alpha=5, target_modules=adaptable(pair.model))
    checkpointer, model = load(source, tmp_path / "out", conversion)
    base = logits(pair.hf)
    assert (logits(model) - base).abs().max() <= 1e-4, "it changes nothing yet"

    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in get_adapter_params(model).items():
            parameter.normal_(std=0.1 if "lora_b" in name else 0.2)
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    in_peft = PeftModel.from_pretrained(copy.deepcopy(pair.hf), saved).eval()
    assert (logits(model) - base).abs().max() > 0.01
    assert (logits(in_peft) - logits(model)).abs().max() <= 1e-4

    targets = json.loads((saved / "adapter_config.json").read_text())["target_modules"]
    torch.manual_seed(4)
    settings = LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False)
    theirs = get_peft_model(copy.deepcopy(pair.hf), settings).eval()
    theirs.save_pretrained(source)
    _, loaded = load(source, tmp_path / "other", conversion)
    assert (logits(theirs) - base).abs().max() > 1e-3
    assert (logits(loaded) - logits(theirs)).abs().max() <= 1e-4
