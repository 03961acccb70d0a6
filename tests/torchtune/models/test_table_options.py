"""Families that need nothing but options of the tables: other names of flags and norms, and either rope layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from torchtune.checkpoints._load_weights import load_base
from torchtune.checkpoints._model_weights import ModelWeights
from torchtune.checkpoints._open_source import open_source
from torchtune.models import ModelSpec, build
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._weight_names import hf_names
from torchtune.models._weight_ops import Identity, InterleaveRope
from torchtune.utils import read_json

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
_QK = {"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"}
_ERNIE = HFFormat(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    "interleaved",  # their rotate_half pairs (2i, 2i + 1)
    biases="attention_bias",
    has_mlp_bias=True,
    bias_fields=("use_bias", "use_bias"),
)


def _read_hunyuan(fields: Fields) -> dict[str, Any]:
    fields.take("eod_token_id", None)  # says nothing about the forward pass
    return {}


_HUNYUAN = HFFormat(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    "half",  # their rotate_half pairs (i, i + d/2)
    biases="attention_bias",
    qk_norm="after_rope",
    read_more=_read_hunyuan,
)
CASES = {
    "flags of biases": (_ERNIE, hf_names(Identity()), {"use_bias": True}),
    "no biases": (_ERNIE, hf_names(Identity()), {"use_bias": False}),
    "names of norms": (_HUNYUAN, hf_names(Identity(), qk_norms=_QK), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_config_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    form, names, options = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(form.model_type, **_SIZES, **options)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.uniform_(0.5, 1.5)
    hf.save_pretrained(tmp_path)
    spec = ModelSpec("trial", (form.architecture,), form.read, form.write, {"hf": names})
    description = spec.from_hf_config(read_json(tmp_path / "config.json", ValueError))
    assert spec.from_hf_config(spec.to_hf_config(description)) == description
    model = build(description, spec).eval()
    load_base(ModelWeights(model), open_source([tmp_path / "model.safetensors"]), torch.device("cpu"))
    tokens = torch.randint(1, 61, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model(tokens) - hf(tokens).logits).abs().max() <= 1e-4


def test_a_wrong_layout_computes_something_else(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("ernie4_5", **_SIZES)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    hf.save_pretrained(tmp_path)
    description = _ERNIE.read(read_json(tmp_path / "config.json", ValueError))
    spec = ModelSpec("wrong", (_ERNIE.architecture,), _ERNIE.read, _ERNIE.write, {"hf": hf_names(InterleaveRope())})
    model = build(description, spec).eval()
    load_base(ModelWeights(model), open_source([tmp_path / "model.safetensors"]), torch.device("cpu"))
    tokens = torch.arange(1, 41)[None]
    with torch.no_grad():
        assert (model(tokens) - hf(tokens).logits).abs().max() > 0.1


def test_ignoring_a_field_is_advised_only_where_it_has_an_effect() -> None:
    config = {**_SIZES, "architectures": ["Ernie4_5ForCausalLM"]}
    with pytest.raises(ValueError, match=r"new_feature = 3, .* or name the field in ignore_fields"):
        _ERNIE.read({**config, "new_feature": 3})
    assert _ERNIE.read({**config, "new_feature": 3}, ["new_feature"]).num_layers == 2
    with pytest.raises(ValueError, match="hidden_act = 'relu', which a model description") as found:
        _ERNIE.read({**config, "hidden_act": "relu"}, ["hidden_act"])
    assert "ignore_fields" not in str(found.value)
