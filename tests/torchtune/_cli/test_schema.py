"""``tune schema``."""

import json

import jsonschema
import yaml

from torchtune._recipe_registry import CONFIGS, get_all_recipes


def test_every_shipped_config_is_valid(tune):
    schema = json.loads(tune("schema").out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    paths = sorted(CONFIGS.rglob("*.yaml"))
    assert len(paths) > 100
    for path in paths:
        validator.validate(yaml.safe_load(path.read_text()))


def test_key_recipe_chooses_the_settings(tune):
    schema = json.loads(tune("schema").out)
    validator = jsonschema.Draft202012Validator(schema)
    config = yaml.safe_load((CONFIGS / "qwen3" / "8B_lora_single_device.yaml").read_text())
    (error,) = validator.iter_errors({**config, "batch_size": 0})
    assert list(error.absolute_path) == ["batch_size"]
    assert not validator.is_valid({**config, "recipe": "no_such_recipe"})


def test_schema_of_one_recipe_needs_no_key_recipe(tune):
    for recipe in get_all_recipes():
        schema = json.loads(tune("schema", recipe.name).out)
        assert schema == json.loads(tune("schema", recipe.path).out)
    refused = tune("schema", "lora_finetune_single_devise")
    assert refused.code == 2
    assert "did you mean" in refused.err
