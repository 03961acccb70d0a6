"""Configuration files of Hugging Face: read, refused by field, written."""

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtune.models
from tests.tiny_images import qwen2_5_vl_config, smolvlm_config
from tests.torchtune.models.families import PUBLISHED
from torchtune.models import ModelError, from_hf_config, get_spec, is_classifier
from torchtune.models.gpt_oss import gpt_oss_20b
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_1 import SPEC as LLAMA3_1

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0",
    "pretraining_tp": 1,
    "eos_token_id": [128001, 128008],
    "initializer_range": 0.02,
}


def _write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "relu"),
        ("rope_local_base_freq", 10_000.0),
        ("rope_scaling", {"rope_type": "axial", "factor": 4.0}),
        ("partial_rotary_factor", 0.5),
        ("num_local_experts", 8),
        ("attn_logit_softcapping", 50.0),
        ("quantization_config", {"quant_method": "gptq"}),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_unsupported_fields_of_a_config_are_refused_by_name(tmp_path, field, value):
    config = {**_LLAMA, field: value}
    with pytest.raises(ModelError, match=f"has {field} = "):
        from_hf_config(_write(tmp_path, config))


def test_unknown_layer_type_is_refused_by_index():
    config = {**_LLAMA, "layer_types": ["full_attention", "mamba", "full_attention"], "num_hidden_layers": 3}
    with pytest.raises(ModelError, match=r"has layer_types\[1\] = 'mamba'"):
        get_spec("llama3").from_hf_config(config)


@pytest.mark.parametrize(
    "family", ["gemma3", "gemma4", "glm4_moe_lite", "granite4", "lfm2", "llama4", "qwen3_5", "smol3"]
)
def test_list_that_is_shorter_than_the_layers_is_refused_by_name(family):
    spec = get_spec(family)
    description = next(iter(getattr(torchtune.models, family).SIZES.values()))
    config = spec.to_hf_config(description)
    lists = [name for name in ("layer_types", "mlp_layer_types", "no_rope_layers") if name in config]
    assert lists
    for name in lists:
        with pytest.raises(ModelError, match=f"has {name} = "):
            spec.from_hf_config({**config, name: config[name][:-1]})


def test_rope_scalings_of_every_type_are_read_and_written():
    spec = get_spec("llama3")
    for scaling in (
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False, "finetuned": True},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16},
        {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32},
        {"type": "dynamic", "factor": 2.0},
        {"type": "linear", "factor": 2.0},
    ):
        description = spec.from_hf_config({**_LLAMA, "rope_scaling": scaling})
        assert (
            type(description.rope_scaling)
            .__name__.lower()
            .startswith({"su": "long"}.get(scaling.get("type"), scaling.get("type", "yarn")))
        )
        assert spec.from_hf_config(spec.to_hf_config(description)) == description
    with pytest.raises(ModelError, match=r"has rope_scaling\.mrope_section = "):
        spec.from_hf_config({**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [4]}})
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0}
    with pytest.raises(ModelError, match="LongRoPE needs 4 factors"):
        spec.from_hf_config({**_LLAMA, "rope_scaling": long})


@pytest.mark.parametrize("value", [1, True, 0.5, "x", [0]])
def test_unknown_field_that_may_change_the_model_is_refused(value):
    with pytest.raises(ModelError, match=r"has my_scale = .*, or name the field in ignore_fields"):
        get_spec("llama3").from_hf_config({**_LLAMA, "my_scale": value})


def test_a_field_can_be_ignored_and_a_missing_one_is_named():
    spec = get_spec("llama3")
    assert spec.from_hf_config({**_LLAMA, "my_note": "x"}, ignore_fields=["my_note"]).vocab_size == 97
    assert spec.from_hf_config({**_LLAMA, "my_note": None, "auto": False}).vocab_size == 97  # say nothing
    with pytest.raises(ModelError, match="lacks the field 'hidden_size'"):
        spec.from_hf_config({key: value for key, value in _LLAMA.items() if key != "hidden_size"})
    with pytest.raises(ModelError, match="sliding_window"):
        spec.from_hf_config({**_LLAMA, "sliding_window": 4096, "use_sliding_window": True})
    broken = {key: value for key, value in _LLAMA["rope_scaling"].items() if key != "factor"}
    with pytest.raises(ModelError, match="lacks the field 'factor'"):
        spec.from_hf_config({**_LLAMA, "rope_scaling": broken})


def _modeling_source(model_type: str) -> str:
    """Return the source of an architecture in transformers."""
    folder = importlib.import_module(f"transformers.models.{model_type}").__path__[0]
    return "".join(path.read_text() for path in Path(folder).glob("*.py"))


# Fields of files on the hub: family and name of a size -> (folder in transformers, fields that it does not read).
_PUBLISHED_FIELDS = {
    ("gemma2", "gemma2_2b"): ("gemma2", {"hidden_act": "gelu_pytorch_tanh"}),
    ("phi3", "phi3_mini"): (
        "phi3",
        {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "full_attn_mod": 1, "interpolate_factor": 1},
    ),
    ("minimax_m2", "minimax_m2"): (
        "minimax_m2",
        {"auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}},
    ),
    ("granite4", "granite4_h_tiny"): (
        "granitemoehybrid",
        {"init_method": "mup", "normalization_function": "rmsnorm"},
    ),
    ("lfm2", "lfm2_1_2b"): (
        "lfm2",
        {"block_dim": 2048, "block_norm_eps": 1e-5, "block_mlp_init_scale": 1.0, "block_out_init_scale": 1.0}
        | {"block_use_swiglu": True, "block_use_xavier_init": True, "conv_dim": 2048, "conv_dim_out": 2048}
        | {"conv_use_xavier_init": True, "num_heads": 32, "use_pos_enc": True},
    ),
}


@pytest.mark.parametrize(("family", "size"), _PUBLISHED_FIELDS)
def test_fields_of_published_files_that_transformers_does_not_read_are_accepted(family, size):
    model_type, fields = _PUBLISHED_FIELDS[family, size]
    source = _modeling_source(model_type)
    assert not [name for name in fields if re.search(rf"\b{name}\b", source)]
    spec = get_spec(family)
    description = getattr(torchtune.models, family).SIZES[size]
    assert spec.from_hf_config({**spec.to_hf_config(description), **fields}) == description


def test_published_fields_of_falcon_h1_are_read_or_refused():
    config = {**_LLAMA, "architectures": ["FalconH1ForCausalLM"], "rope_scaling": None, "mamba_d_ssm": 128}
    config |= {"mamba_n_heads": 4, "mamba_norm_before_gate": False}
    spec = get_spec("falcon_h1")
    published = {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "attn_layer_indices": None}
    assert not [name for name in published if re.search(rf"\b{name}\b", _modeling_source("falcon_h1"))]
    assert spec.from_hf_config({**config, **published}) == spec.from_hf_config(config)
    with pytest.raises(ModelError, match="mamba_use_mlp"):
        spec.from_hf_config({**config, "mamba_use_mlp": False})


@pytest.mark.parametrize(
    ("family", "make_config", "part", "fields"),
    [
        ("qwen2_5_vl", qwen2_5_vl_config, "vision_config", {"in_chans": 3, "spatial_patch_size": 4}),
        (
            "smolvlm",
            smolvlm_config,
            "text_config",
            {"pixel_shuffle_factor": 4, "perceiver_config": {"resampler_depth": 6}, "qk_layer_norms": False},
        ),
    ],
)
def test_published_fields_of_vision_language_models_are_accepted(family, make_config, part, fields):
    source = _modeling_source(family) + _modeling_source("llama")
    assert not [name for name in fields if re.search(rf"\b{name}\b", source)]
    spec = get_spec(family)
    config = {**make_config().to_dict(), "architectures": [spec.architectures[0]]}
    published = {**config, part: {**config[part], **fields}}
    assert spec.from_hf_config(published) == spec.from_hf_config(config)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json in"):
        from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        from_hf_config(tmp_path)
    with pytest.raises(ModelError, match="names no architecture"):
        from_hf_config(_write(tmp_path, {"model_type": "llama"}))
    with pytest.raises(ModelError, match="architecture 'MambaForCausalLM'"):
        from_hf_config(_write(tmp_path, {"architectures": ["MambaForCausalLM"]}))


def test_a_description_that_the_architecture_cannot_express_is_not_written():
    with torch.device("meta"):
        description = llama3(97, 2, 6, 2, 48, 256, intermediate_dim=80).description
    assert LLAMA3_1.from_hf_config(LLAMA3_1.to_hf_config(description)) == description
    for field, value in (("q_bias", True), ("qk_norm", "before_rope"), ("rope_layout", "half")):
        with pytest.raises(ModelError, match=f"LlamaForCausalLM cannot express {field} = "):
            LLAMA3_1.to_hf_config(dataclasses.replace(description, **{field: value}))
    with pytest.raises(ModelError, match="Qwen3ForCausalLM cannot express"):
        get_spec("qwen3").to_hf_config(description)


def test_published_files_of_mixtures_are_read():
    """Spelt as transformers 4 spelt them, with what says the same thing twice."""
    gpt_oss = {**PUBLISHED["gpt_oss_20b"], "experts_per_token": 4, "initial_context_length": 4096}
    gpt_oss["quantization_config"] = {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}
    spec = get_spec("gpt_oss")
    with torch.device("meta"):
        assert spec.from_hf_config(gpt_oss) == gpt_oss_20b().description
    for field, value in {"quantization_config": {"quant_method": "fp8"}, "swiglu_alpha": 1.0}.items():
        with pytest.raises(ModelError, match=field):
            spec.from_hf_config({**gpt_oss, field: value})
    qwen = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 64}
    qwen |= {"vocab_size": 50, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
    described = get_spec("qwen3_moe").from_hf_config({**qwen, "mlp_only_layers": [3], "moe_intermediate_size": 8})
    assert described.expert_layers == (1, 5)
    assert (described.num_experts, described.experts_per_token, described.expert_dim) == (4, 2, 8)


@pytest.mark.parametrize(
    ("fields", "names", "problem_type"),
    [
        ({"id2label": {"0": "ham", "1": "spam"}, "problem_type": "regression"}, ("ham", "spam"), "regression"),
        ({"id2label": {"1": "spam", "0": "ham"}}, ("ham", "spam"), None),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, (), None),
        ({"num_labels": 2}, (), None),
    ],
)
def test_names_of_classes_are_read_and_written(fields, names, problem_type):
    config = {**_LLAMA, "architectures": ["LlamaForSequenceClassification"], **fields}
    description = LLAMA3_1.from_hf_config(config)
    assert (description.num_classes, description.class_names, description.problem_type) == (2, names, problem_type)
    written = LLAMA3_1.to_hf_config(description)
    assert written["id2label"] == dict(enumerate(names or ("LABEL_0", "LABEL_1")))
    assert written["label2id"] == {name: index for index, name in written["id2label"].items()}
    assert written.get("problem_type") == problem_type


def test_folder_of_a_classifier_is_told_by_its_architecture(tmp_path):
    assert not is_classifier(tmp_path), "there is no config.json"
    for architecture, expected in (("LlamaForCausalLM", False), ("LlamaForSequenceClassification", True)):
        (tmp_path / "config.json").write_text(json.dumps({**_LLAMA, "architectures": [architecture]}))
        assert is_classifier(tmp_path) is expected
        assert (LLAMA3_1.from_hf_config({**_LLAMA, "architectures": [architecture]}).num_classes > 0) is expected
