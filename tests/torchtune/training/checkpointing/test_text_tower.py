"""The text tower of a model that also sees: read from its files, and saved as a model of text alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from torchtune.models import ModelError, from_hf_config
from torchtune.training import FullModelHFCheckpointer

_TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TOKENS = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def _whole(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "Gemma3":
        config: Any = transformers.Gemma3Config(
            text_config={**_TEXT, "sliding_window": 9}, vision_config=_IMAGE, mm_tokens_per_image=1
        )
    else:
        config = transformers.Mistral3Config(
            text_config={**_TEXT, "model_type": "mistral"},
            vision_config={**_IMAGE, "model_type": "pixtral"},
            tie_word_embeddings=False,
        )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["Gemma3", "Mistral3"])
def test_text_tower_comes_out_as_a_model_of_its_own(name: str, prefix: str, tmp_path: Path) -> None:
    hf, folder = _whole(name), tmp_path / "whole"
    hf.save_pretrained(folder)
    if prefix == "model.language_model.":  # how newer files spell it
        weights = {
            key.replace("language_model.model.", prefix).replace("language_model.lm_head", "lm_head"): value
            for key, value in load_file(folder / "model.safetensors").items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = from_hf_config(folder)
    checkpointer = FullModelHFCheckpointer(str(folder), output_dir=str(tmp_path / "out"))
    checkpointer.load_model(model, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        expected = hf(TOKENS).logits
        assert (model.eval()(TOKENS) - expected).abs().max() <= 1e-4

    checkpointer.save("epoch_0", model)
    saved = tmp_path / "out" / "epoch_0"
    text = name.removesuffix("3") if name == "Mistral3" else name
    assert json.loads((saved / "config.json").read_text())["architectures"] == [f"{text}ForCausalLM"]
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        saved, output_loading_info=True, dtype=torch.float32
    )
    assert type(again).__name__ == f"{text}ForCausalLM"
    assert not any(loading.values()), loading
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS).logits, expected)


def test_a_tower_that_no_family_reads_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["NewForConditionalGeneration"], "text_config": {"model_type": "new_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="model_type = 'new_text' cannot be read; there are: gemma3_text"):
        from_hf_config(tmp_path)
