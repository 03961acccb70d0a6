"""The JSON schema of settings, validated by the package jsonschema."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import jsonschema
import pytest

from torchtune.config import Component, PositiveInt, Range, json_schema


@dataclass
class Nested:
    # Depth of the nested settings.
    depth: int = 2


@dataclass
class Settings:
    model: Component
    # Passes over the data.
    epochs: PositiveInt = 1
    rate: Annotated[float | None, Range(above=0, below=1)] = None
    dtype: Literal["bf16", "fp32"] | None = None
    name: str = "run"
    converters: list[Component] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    nested: Nested = field(default_factory=Nested)


MODEL = {"_component_": "torchtune.models.qwen3.qwen3_8b", "tie": True}


@pytest.fixture(scope="module")
def validator():
    schema = json_schema(Settings)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epochs": 3, "rate": 0.5, "dtype": "bf16", "name": "a"},
        {"rate": None, "dtype": None},
        {"epochs": "${number}", "rate": "${a.b}", "number": 2},
        {"converters": [MODEL, "${model}"], "counts": {"a": 1}, "nested": {"depth": 3}},
    ],
)
def test_settings_that_a_recipe_takes_are_valid(validator, settings):
    validator.validate({"model": MODEL, **settings})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", {"component": "a.b"}),
        ("model", "torchtune.models.qwen3.qwen3_8b"),
        ("epochs", 0),
        ("epochs", "three"),
        ("epochs", None),
        ("rate", 1),
        ("rate", 0),
        ("dtype", "fp8"),
        ("name", 5),
        ("converters", MODEL),
        ("counts", {"a": "b"}),
        ("nested", {"depth": "deep"}),
    ],
)
def test_settings_that_a_recipe_refuses_are_invalid(validator, key, value):
    with pytest.raises(jsonschema.ValidationError) as refused:
        validator.validate({"model": MODEL, key: value})
    assert refused.value.absolute_path[0] == key


def test_schema_has_defaults_comments_and_required_keys():
    schema = json_schema(Settings)
    assert schema["required"] == ["model"]
    assert schema["properties"]["epochs"]["default"] == 1
    assert schema["properties"]["epochs"]["description"] == "Passes over the data."
    nested = schema["properties"]["nested"]["anyOf"][0]
    assert nested["properties"]["depth"]["description"] == "Depth of the nested settings."


def test_recipe_without_settings_takes_any_mapping():
    assert json_schema(lambda cfg: None) == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
    }
