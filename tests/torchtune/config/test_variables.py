"""Keys that are no settings: variables that references name, notes of the user's own, and misspelt settings."""

import logging
import time
from pathlib import Path

import pytest
import yaml

from tests.torchtune.config.assets import typed_recipe, untyped_recipe
from torchtune.config import ConfigError, load_and_check, save_config

ASSETS = Path(__file__).parent / "assets"
PARTS = "tests.torchtune.config.assets.parts"
RECIPES = {"typed": typed_recipe, "untyped": untyped_recipe}


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load the config of a fixture with more lines at its top, as the file ``c.yaml``."""
    monkeypatch.chdir(tmp_path)

    def load(lines, *overrides, name="typed"):
        Path("c.yaml").write_text(lines + (ASSETS / f"{name}.yaml").read_text())
        return load_and_check("c.yaml", overrides, RECIPES[name].recipe_main)

    return load


def mistakes(load, lines, *overrides, name="typed"):
    with pytest.raises(ConfigError) as caught:
        load(lines, *overrides, name=name)
    return [str(mistake) for mistake in caught.value.errors]


@pytest.mark.parametrize(
    ("lines", "reference"),
    [
        ("model_dir: /models/tiny\n", "${model_dir}"),
        ("base: /models\nmodel_dir: ${base}/tiny\n", "${model_dir}"),
        ("paths:\n  model: /models/tiny\n  unused: /data\n", "${paths.model}"),
        ("paths:\n  base: /models\n  model: ${.base}/tiny\n", "${paths.model}"),
        ("sizes: {small: tiny, large: big}\nwhich: small\n", "/models/${sizes.${which}}"),
        ("folders: [/data, /models/tiny]\n", "${folders[1]}"),
        ("model_dir: /models/tiny\n", "${..model_dir}"),
        ("model_dir: /models/tiny\n", "${oc.select:model_dir,/none}"),
    ],
)
def test_a_key_that_a_reference_names_is_a_variable(lines, reference, load, caplog):
    settings = load(f"{lines}prompt:\n  system: {reference}\n")
    assert settings.prompt == {"system": "/models/tiny"}
    cfg = load(lines, f"inference.max_steps={reference}", name="untyped")
    assert cfg.inference.max_steps == "/models/tiny"
    assert warnings(caplog) == []


def test_a_variable_is_set_on_the_command_line(load):
    lines = "model_dir: /models/tiny\nprompt: {system: '${model_dir}'}\n"
    assert load(lines, "model_dir=/models/other").prompt == {"system": "/models/other"}


def test_a_section_that_only_its_own_values_refer_to_is_reported_as_unread(load, caplog):
    load("paths: {base: /models, model: '${paths.base}/tiny'}\n")
    assert warnings(caplog) == [
        "The recipe never reads paths (c.yaml:1; did you mean 'tokenizer.path'?) of the config, so setting it has no "
        "effect."
    ]


def test_the_name_of_a_resolver_is_no_reference_to_a_key(load, caplog, monkeypatch):
    monkeypatch.setenv("MODELS", "/home/somebody/models")
    load("oc: overclocked\nprompt: {system: '${oc.env:MODELS}'}\n")
    assert warnings(caplog) == ["The recipe never reads oc (c.yaml:1) of the config, so setting it has no effect."]


def test_notes_in_the_file_are_a_warning_with_the_nearest_names(load, caplog):
    settings = load("project: tiny runs\nhypothesis: more layers\npeople: [a, b]\nmodel_dir: /models\nversion: 3\n")
    assert not hasattr(settings, "project")
    assert warnings(caplog) == [
        "The recipe never reads hypothesis (c.yaml:2), model_dir (c.yaml:4; did you mean 'model'?), "
        "people (c.yaml:3), project (c.yaml:1; did you mean 'metric_logger.project'?), version (c.yaml:5) of the "
        "config, so setting it has no effect."
    ]
    caplog.clear()
    load("num_warmup_steps: a tenth\n")  # a text under the name of an argument
    assert "did you mean 'lr_scheduler.num_warmup_steps'?" in warnings(caplog)[0]
    caplog.clear()
    load("hypothesis: more layers\nepoch_notes: [a]\n", name="untyped")
    assert warnings(caplog) == [
        "untyped_recipe.py never reads epoch_notes (c.yaml:2; did you mean 'epochs'?), hypothesis (c.yaml:1) of the "
        "config, so setting it has no effect."
    ]


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        # a text with a wrong letter or two
        ("dtpye: bf16", "dtpye: there is no such setting; did you mean 'dtype'?"),
        ("metric_loger: null", "metric_loger: there is no such setting; did you mean 'metric_logger'?"),
        # numbers and switches: resembling a setting, or named as an argument of a component is
        ("num_epochs: 5", "num_epochs: there is no such setting; did you mean 'epochs'?"),
        ("lr: 1e-5", "lr: there is no such setting; did you mean 'optimizer.lr'?"),
        ("weight_decy: 0.1", "weight_decy: there is no such setting; did you mean 'optimizer.weight_decay'?"),
        ("packed: True", "packed: there is no such setting; did you mean 'dataset.0.packed'?"),
    ],
)
def test_a_misspelt_setting_is_a_mistake(line, mistake, load):
    assert mistakes(load, f"{line}\n") == [f"c.yaml:1: {mistake}"]


def test_a_misspelt_setting_of_an_untyped_recipe_is_a_mistake(load):
    lines = "model_comment: small\nnum_epochs: 5\nbatchsize: four\nlayers: 3\n"
    assert mistakes(load, lines, name="untyped") == [
        "c.yaml:2: num_epochs: is never read by untyped_recipe.py; did you mean 'epochs'?",
        "c.yaml:3: batchsize: is never read by untyped_recipe.py; did you mean 'batch_size'?",
        "c.yaml:4: layers: is never read by untyped_recipe.py",
    ]


@pytest.mark.parametrize("name", ["typed", "untyped"])
def test_a_key_on_the_command_line_that_nothing_reads_is_a_mistake(name, load):
    (mistake,) = mistakes(load, "hypothesis: more layers\n", "hypothesis=fewer layers", name=name)
    assert mistake.startswith("command line: hypothesis: ")


def test_an_unknown_argument_of_a_component_is_a_mistake(load):
    assert mistakes(load, "", "model.note=small", "tokenizer.prompt_template.note=x") == [
        f"command line: model.note: {PARTS}.Model takes no argument 'note'",
        f"command line: tokenizer.prompt_template.note: {PARTS}.Template takes no argument 'note'",
    ]


def test_a_saved_config_has_the_variables_of_references_to_the_environment(load, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", "/home/somebody/models")
    settings = load("base: ${oc.env:MODELS}\nnote: mine\nprompt: {system: '${base}/tiny'}\n")
    save_config(settings, tmp_path / "saved.yaml")
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())
    assert (saved["base"], saved["prompt"]) == ("${oc.env:MODELS}", {"system": "${base}/tiny"})
    assert "note" not in saved
    again = load_and_check(tmp_path / "saved.yaml", [], typed_recipe.recipe_main)
    assert again.prompt == {"system": "/home/somebody/models/tiny"}


def doubled(count):
    lines = [f"a{number}: ${{a{number - 1}}}${{a{number - 1}}}" for number in range(1, count + 1)]
    return "\n".join(["a0: x", *lines, ""])


@pytest.mark.parametrize(
    "lines",
    [
        doubled(30),
        "\n".join(reversed(doubled(30).splitlines())) + "\n",
        "a0: {x: 1}\n" + "".join(f"a{n}: {{x: '${{a{n - 1}}}', y: '${{a{n - 1}}}'}}\n" for n in range(1, 31)),
        "".join(f"a{n}:\n- ${{a{n - 1}.0}}${{a{n - 1}[0]}}\n" for n in range(1, 31)) + "a0: [x]\n",
        f"a: {'x' * 20_000}\nb: {'${a}' * 60}\n",
        "loop: ${loop}\n" + doubled(30),
    ],
)
def test_references_that_grow_beyond_a_config_are_refused_at_once(lines, load):
    start = time.process_time()
    (mistake,) = mistakes(load, lines)
    assert "refers to too much: resolving it takes the config over 20,000 references or 1 MiB of text" in mistake
    assert time.process_time() - start < 2
    assert load(doubled(8) + "prompt: {system: '${a8}'}\n").prompt == {"system": "x" * 256}
