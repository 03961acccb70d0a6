"""Families are found by name and architecture, and other packages can add theirs."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchtune.models import ModelError, from_hf_config, get_spec, list_specs, register, spec_for_architecture
from torchtune.models import _spec as registry

_CONFIG = {
    "architectures": ["WideLlamaForCausalLM"],
    "vocab_size": 97,
    "width": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable, and forget what a test registers."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "outside_family")
    monkeypatch.setattr(registry, "_registered", {})


def test_built_in_families_are_found_by_name_and_architecture():
    for name in list_specs():
        spec = get_spec(name)
        assert spec.name == name
        assert "hf" in spec.weight_maps
        assert pickle.loads(pickle.dumps(spec)).name == name  # with a model that another process is given
    assert spec_for_architecture("Qwen3ForCausalLM") is get_spec("qwen3")
    with pytest.raises(ModelError, match=r"no model family 'llama9'; there are: .*code_llama2, .*gemma, "):
        get_spec("llama9")
    with pytest.raises(ModelError, match="architecture 'NopeLM'"):
        spec_for_architecture("NopeLM")
    with pytest.raises(ModelError, match=r"no weight names for 'meta', only for: gguf, hf"):
        get_spec("qwen3").weight_map("meta")


def test_registered_family_reads_its_architecture(outside, tmp_path):
    import wide_llama

    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    with pytest.raises(ModelError, match="WideLlamaForCausalLM"):
        from_hf_config(tmp_path)
    assert register(wide_llama.SPEC) is wide_llama.SPEC
    register(wide_llama.SPEC)  # again is no error
    assert get_spec("wide_llama") is wide_llama.SPEC
    with torch.device("meta"):
        model = from_hf_config(tmp_path)
    assert model.spec is wide_llama.SPEC
    assert model.description.embed_dim == 48
    assert model.spec.to_hf_config(model.description)["width"] == 48
    with pytest.raises(ModelError, match="'wide_llama' is registered already"):
        register(replace(wide_llama.SPEC))
    with pytest.raises(ModelError, match="'llama3' is registered already"):
        register(replace(wide_llama.SPEC, name="llama3"))


def test_family_is_found_by_a_dotted_path(outside):
    import wide_llama

    assert get_spec("wide_llama.SPEC") is wide_llama.SPEC
    with pytest.raises(ModelError, match="is of type int, not a"):
        get_spec("wide_llama.NOT_A_SPEC")
    with pytest.raises(ModelError, match=r"could not be imported: .*MISSING"):
        get_spec("wide_llama.MISSING")


def test_family_is_found_by_an_entry_point(outside, tmp_path, monkeypatch):
    import wide_llama

    metadata = tmp_path / "wide_llama-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wide-llama\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torchtune.models]\nwide_llama = wide_llama:SPEC\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "wide_llama" in list_specs()
    assert get_spec("wide_llama") is wide_llama.SPEC
    assert spec_for_architecture("WideLlamaForCausalLM") is wide_llama.SPEC
