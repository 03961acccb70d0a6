"""A ``config.json`` of absurd sizes and wrong types: refused in one sentence that names the field, at once."""

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.tiny_images import CONFIGS
from tests.torchtune.models.families import FAMILIES, SMALL
from tests.torchtune.models.test_left_out_fields import _FILES, _SIZES, _filled
from tests.work import at_most
from torchtune.models import ModelError, ModelSpec, from_hf_config, spec_for_architecture

_ABSURD = ["7", -3, 0.5, 1e30, float("nan"), float("inf"), [8], {"a": 1}, True, 10**12, 10**30, "x" * 10_000]


def _refusal(folder: Path) -> str | None:
    """What reading the folder says; None if it is read."""
    try:
        with at_most(5 * 10**6), torch.device("meta"):
            from_hf_config(folder)
        text = None
    except ModelError as error:
        text = str(error)
        assert "\n" not in text
        assert len(text) < 600
    return text


def _config_of(name: str) -> dict[str, Any]:
    """A config of one layer, with every field."""
    architecture, other_fields = _FILES[name]
    config = _filled(architecture, {**_SIZES, **other_fields, "num_hidden_layers": 1, "layer_types": None}).to_dict()
    return config | {"architectures": [f"{architecture}ForCausalLM"], "num_hidden_layers": 1}


def _refusal_of(folder: Path, config: dict[str, Any]) -> str | None:
    (folder / "config.json").write_text(json.dumps(config))
    return _refusal(folder)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "phi4_mini_long", "smol3", "granite4_h", "qwen3_moe", "gpt_oss"])
def test_a_wrong_value_in_any_field_is_refused_by_name(tmp_path, name):
    config = _config_of(name)
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"}
    shared = _filled("Llama", _SIZES).to_dict() if name != "llama3" else {}
    for number, field in enumerate(config):
        for value in _ABSURD[number % 3 :: 3] if field in shared else _ABSURD:
            text = _refusal_of(tmp_path, {**config, field: value})
            if text is None:
                assert field not in sizes or (value is True and field != "num_hidden_layers"), (field, value)
            else:
                assert field in text or field.startswith("rope"), (field, value, text)


def _variations(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the config with a wrong value in a field, a part of it, or an entry of a list; every third of them."""
    values = [*_ABSURD, 0, None, [], {}]
    number = 0
    for field, original in config.items():
        wrong_values: list[Any] = list(values)
        if isinstance(original, dict):
            for key, value in product(original, values):
                wrong_values.append({**original, key: value})
        if isinstance(original, list):
            wrong_values += [original[:-1], [*original, 9999], ["a"] * len(original), [None] * len(original)]
        for value in wrong_values:
            number += 1
            if number % 3 == 0:
                yield {**config, field: value}


def _refusal_by(spec: ModelSpec, config: dict[str, Any]) -> str:
    """The error of a config; empty if it is read."""
    try:
        spec.from_hf_config(config)
    except ModelError as error:
        return str(error)
    return ""


def _check_refusals(spec: ModelSpec, configs: Iterable[dict[str, Any]]) -> None:
    texts = [_refusal_by(spec, config) for config in configs]
    assert any(texts)
    for text in texts:
        assert "\n" not in text
        assert len(text) < 600


@pytest.mark.parametrize("name", FAMILIES)
def test_wrong_value_is_a_model_error_in_every_family(name):
    architecture, options = FAMILIES[name]
    spec = spec_for_architecture(f"{architecture}ForCausalLM")
    config = _filled(architecture, {**SMALL, **options}).to_dict()
    config["architectures"] = [f"{architecture}ForCausalLM"]
    _check_refusals(spec, _variations(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_value_is_a_model_error_in_every_family_with_images(name):
    config = CONFIGS[name]().to_dict()
    architecture = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config["model_type"]]
    spec = spec_for_architecture(architecture)
    config["architectures"] = [architecture]
    _check_refusals(spec, _variations(config))
    for part in ("text_config", "vision_config"):
        _check_refusals(spec, ({**config, part: wrong_part} for wrong_part in _variations(config[part])))


def test_size_of_zero_is_refused_by_name(tmp_path):
    fields = {
        "gemma2": "query_pre_attn_scalar",
        "llama3": "num_attention_heads",
        "granite4_h": "hidden_size",
    }
    for name, field in fields.items():
        assert field in (_refusal_of(tmp_path, {**_config_of(name), field: 0}) or ""), name


def test_sizes_beyond_memory_are_refused(tmp_path):
    config = {**_SIZES, "architectures": ["LlamaForCausalLM"]}
    for field, value in {"num_hidden_layers": 10**6, "hidden_size": 10**12, "vocab_size": 2**62}.items():
        assert field in (_refusal_of(tmp_path, {**config, field: value}) or ""), field
    large = {"num_hidden_layers": 200, "hidden_size": 2**20, "vocab_size": 2**28, "intermediate_size": 2**22}
    large |= {"num_attention_heads": 2**6, "head_dim": 2**14}
    assert _refusal_of(tmp_path, {**config, **large}) is None  # describing it costs little; no one can hold it


@pytest.mark.parametrize(
    "content",
    [
        "[" * 200_000,
        '{"a":' * 100_000,
        "1" * 10_000,
        "[]",
        "null",
        "\x00",
        '{"architectures": "LlamaForCausalLM"}',
        '{"architectures": 3}',
        '{"architectures": {"a": 1}}',
        '{"architectures": [["LlamaForCausalLM"]]}',
        '{"architectures": []}',
        '{"text_config": {"model_type": ["llama"]}}',
        '{"text_config": {"model_type": "llama", "hidden_size": {}}}',
        '{"architectures": ["LlamaForSequenceClassification"], "num_labels": 1e30}',
    ],
)
def test_json_that_is_not_a_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert _refusal(tmp_path)


def test_config_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    assert "is not a file" in (_refusal(tmp_path) or "")
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert "is not a file" in (_refusal(tmp_path) or "")
