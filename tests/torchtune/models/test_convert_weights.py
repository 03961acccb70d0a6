"""The whole-state-dict functions are faces of the weight maps."""

import pytest
import torch

from torchtune.models import WeightMapError, convert_weights
from torchtune.models.llama3 import llama3
from torchtune.models.qwen2 import qwen2, qwen2_hf_to_tune, qwen2_tune_to_hf

_TINY = {"vocab_size": 11, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 8}
_SHAPE = {"num_heads": 4, "num_kv_heads": 2, "dim": 16}


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_state_dicts_of_hugging_face_and_meta_come_back_unchanged():
    model = llama3(**_TINY, intermediate_dim=8)
    state = model.state_dict()
    converted = convert_weights.tune_to_hf(state, **_SHAPE)
    assert _equal(converted, dict(model.spec.weight_map("hf").to_external(state.items(), model.description)))
    assert _equal(convert_weights.hf_to_tune(converted, **_SHAPE), state)
    state["layers.1.attn.q_proj.lora_a.weight"] = torch.ones(2, 16)
    meta = convert_weights.tune_to_meta(state)
    assert "layers.1.attention.wq.lora_a.weight" in meta
    assert _equal(convert_weights.meta_to_tune(meta), state)
    with pytest.raises(WeightMapError, match="belongs to no module"):
        convert_weights.tune_to_meta({"layers.1.attn.x.lora_a.weight": torch.ones(2, 16)})


@pytest.mark.parametrize("tied", [False, True])
def test_state_dicts_of_qwen_come_back_unchanged(tied):
    state = qwen2(**_TINY, intermediate_dim=8, tie_word_embeddings=tied).state_dict()
    converted = qwen2_tune_to_hf(state, **_SHAPE, tie_word_embeddings=tied)
    assert ("lm_head.weight" in converted) is not tied
    assert _equal(qwen2_hf_to_tune(converted, **_SHAPE, tie_word_embeddings=tied), state)
    converted["lm_head.weight"] = converted["model.embed_tokens.weight"]
    assert ("output.weight" in qwen2_hf_to_tune(converted, **_SHAPE, tie_word_embeddings=tied)) is not tied


def test_adapters_are_converted_to_names_of_peft():
    name = "layers.0.attn.output_proj.lora_b.weight"
    converted = convert_weights.tune_to_peft_adapter_weights({name: torch.ones(16, 2)}, **_SHAPE)
    assert list(converted) == ["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"]
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "output_proj", "w1", "w2", "w3", "output"]}
    written = convert_weights.tune_to_peft_adapter_config(config, "somewhere/base")
    assert written["target_modules"] == ["q_proj", "o_proj", "gate_proj", "down_proj", "up_proj", "lm_head"]
    assert written["base_model_name_or_path"] == "somewhere/base"
    with pytest.raises(ValueError, match="lacks 'r'"):
        convert_weights.tune_to_peft_adapter_config({"target_modules": [], "lora_alpha": 1})
    with pytest.raises(ValueError, match="'x' has no name in PEFT"):
        convert_weights.tune_to_peft_adapter_config({**config, "target_modules": ["x"]})


def test_mapped_key_replaces_the_layer_number():
    table = {"a.{}.b": "x.{}.y", "c": "z"}
    assert convert_weights.get_mapped_key("a.12.b", table) == "x.12.y"
    assert convert_weights.get_mapped_key("c", table) == "z"
    with pytest.raises(WeightMapError, match=r"'a.{}.c' for the tensor 'a.1.c'"):
        convert_weights.get_mapped_key("a.1.c", table)
