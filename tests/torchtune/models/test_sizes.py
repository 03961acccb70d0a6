"""Every named size, on the meta device: names and shapes of transformers, and numbers of the published tables."""

import copy
import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

import torchtune.models
from tests.torchtune.checkpoints.small import OF_TEXT, config_class
from tests.torchtune.models.conftest import on_disk
from tests.torchtune.models.families import COUNTED, DIMENSIONS, OF_SIZES, PUBLISHED, STATED
from torchtune._lazy import modules_in
from torchtune.models import Description, get_spec
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"torchtune.models.{family}")


def _sizes(family: str) -> dict[str, Description]:
    if family == "llama3_2_vision":  # its rows describe a decoder and an encoder
        return {}
    module = _module(family)
    return {**getattr(module, "SIZES", {}), **getattr(module, "REWARD_SIZES", {})}


# (family, builder)
SIZES: list[tuple[str, str]] = []
for _family in modules_in(torchtune.models.__path__):
    SIZES += product([_family], _sizes(_family))


@pytest.fixture(scope="module", autouse=True)
def skip_random_initialization() -> Iterator[None]:
    """On the meta device there are no values: what would be drawn at random took a quarter of the time."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(kind, "reset_parameters", lambda module: None)
        yield


def test_every_builder_is_in_one_table():
    assert sorted(name for _, name in SIZES) == sorted([*PUBLISHED, *COUNTED, *STATED])
    assert all(callable(getattr(_module(family), f"lora_{name}")) for family, name in SIZES)


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_named_size_has_the_names_and_shapes_of_transformers(family, name):
    with torch.device("meta"):
        model = getattr(_module(family), name)()
    if name not in PUBLISHED:
        count = COUNTED[name][0] if name in COUNTED else STATED[name]["parameters"]
        assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model.spec is (get_spec("llama4_vl") if family == "llama4" else _module(family).SPEC)

    import transformers

    config = model.spec.to_hf_config(model.description)
    architecture = config["architectures"][0]
    with torch.device("meta"):
        kind = re.sub("For(CausalLM|SequenceClassification)$", "", architecture)
        kind = f"{kind}TextConfig" if kind.startswith(OF_TEXT) else f"{kind}Config"
        kind = re.sub("ForConditionalGeneration.*", "Config", kind)
        hf_model = getattr(transformers, architecture)(getattr(transformers, kind)(**config))
    untrained = [
        (key, value)
        for key, value in hf_model.named_buffers()
        if key.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))
    ]
    tensors = [*hf_model.named_parameters(), *untrained]
    expected = {key: value.shape for key, value in on_disk(tensors, family).items()}
    hf_tensors = model.spec.weight_map("hf").to_external(model.state_dict().items(), model.description)
    assert {key: value.shape for key, value in hf_tensors} == expected
    assert model.spec.from_hf_config(config) == model.description
    assert model.spec.from_hf_config(hf_model.config.to_dict()) == model.description


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_every_number_is_the_published_one(family, name):
    description = _sizes(family)[name]
    spec = _module(family).SPEC
    if name in COUNTED:
        published = _sizes(family)[COUNTED[name][1]]
        assert replace(description, **{field: getattr(published, field) for field in DIMENSIONS}) == published
        return
    if name in STATED:
        stated = {field: value for field, value in STATED[name].items() if field != "parameters"}
        assert {field: getattr(description, field) for field in stated} == stated
        defaults = spec.from_hf_config(_filled({"architectures": [*spec.architectures]}))
        other_fields = [field for field in vars(description) if field not in OF_SIZES]
        assert {field: getattr(description, field) for field in other_fields} == {
            f: getattr(defaults, f) for f in other_fields
        }
        assert description.embed_scale == description.embed_dim**0.5
        return
    assert spec.from_hf_config(_filled(PUBLISHED[name])) == description
    if "num_hidden_layers" in PUBLISHED[name]:
        assert spec.from_hf_config(PUBLISHED[name]) == description


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """A file with the defaults of transformers' config class."""
    import transformers

    transformers.logging.set_verbosity_error()
    (architecture,) = config["architectures"]
    stem = re.sub("For(CausalLM|SequenceClassification)$", "", architecture)
    return {**config_class(stem).from_dict(copy.deepcopy(config)).to_dict(), "architectures": [architecture]}


@pytest.mark.parametrize(("family", "name"), dict(SIZES).items())  # one of each family
def test_lora_builder_freezes_all_base_weights(family, name):
    builder = getattr(_module(family), f"lora_{name}")
    with torch.device("meta"):
        plain = getattr(_module(family), name)()
        count = sum(parameter.numel() for parameter in plain.parameters())
        if family in ("phi3", "phi4"):  # their files hold queries, keys and values in one matrix
            (report,) = apply_conversions(plain, [LoRA(rank=8, alpha=16, target_modules=["w1"])])
            assert "mlp.w3 and its like" in str(report)
            trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
            assert len(trained) == 2 * len(plain.layers)
            assert all(".mlp.w1.lora_" in name for name in trained)
        model = builder(["q_proj", "k_proj", "v_proj", "output_proj"])
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    assert frozen == count
