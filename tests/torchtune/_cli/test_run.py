"""tune run and tune validate: what is found, checked, started and refused."""

import re
import sys

import pytest

from tests.recipes.runs import write_config
from torchtune._cli.run import parse_command
from torchtune.utils import UserError

OWN_RECIPE = '''
"""A recipe of a user."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import neighbour
from torchtune import config, utils
from torchtune.config import Range


@dataclass(kw_only=True)
class Settings:
    """Settings of a small recipe."""

    # Where the note goes.
    note: str
    # How often to say it.
    times: Annotated[int, Range(min=1)] = 1
    # Whether to fail as a user would see it.
    fail: bool = False


@config.parse
def recipe_main(cfg: Settings) -> int:
    """Write down what was asked for."""
    if cfg.fail:
        raise utils.UserError("note: there is no ink.")
    Path("note.json").write_text(json.dumps({"note": cfg.note, "times": cfg.times, "word": neighbour.WORD}))
    return 0


if __name__ == "__main__":
    sys.exit(recipe_main())
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with a recipe of the user's, a module that it imports and a config for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_RECIPE)
    (tmp_path / "neighbour.py").write_text('WORD = "hello"\n')
    (tmp_path / "own.yaml").write_text("recipe: own.py\nnote: first\n")
    (tmp_path / "mapped.yaml").write_text("note: first\nrecipe: {a: 1}\n")
    (tmp_path / "text.yaml").write_text("This is plain text\n")
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return tmp_path


def note(folder):
    return (folder / "note.json").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ("own.py", "--config", "own.yaml"),
        ("own", "--config=own.yaml"),
        ("--config", "own.yaml"),
        ("./own.py", "--config", "own.yaml"),
    ],
)
def test_users_recipe_runs(tune, folder, command):
    assert tune("run", *command).code == 0
    assert '"note": "first"' in note(folder)
    assert '"word": "hello"' in note(folder)


def test_overrides_may_contain_the_equals_sign(tune, folder):
    assert tune("run", "--config", "own.yaml", "note=a=b=c", "times=3").code == 0
    assert '"note": "a=b=c", "times": 3' in note(folder)


def test_a_dotted_module_runs(tune, folder):
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").touch()
    (folder / "mine" / "own.py").write_text(OWN_RECIPE)
    assert tune("run", "mine.own", "--config", "own.yaml", "note=dotted").code == 0
    assert '"note": "dotted"' in note(folder)


def test_help_after_a_recipe_prints_its_settings(tune, folder):
    assert "torchrun" in tune("run", "--help").out
    result = tune("run", "own.py", "--help")
    assert result.code == 0
    assert "note: str (required)\n      Where the note goes." in result.out
    shipped = tune("run", "lora_finetune_single_device", "--help")
    assert "save_adapter_weights_only" in shipped.out
    assert tune("run", "--config", "llama3_2/1B_lora_single_device", "--help").out == shipped.out


def test_mistakes_are_shown_before_anything_runs(tune, folder):
    result = tune("run", "--config", "own.yaml", "times=0", "nte=second")
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "times" in result.err
    assert "did you mean 'note'?" in result.err
    assert not (folder / "note_0.json").exists()


def test_user_error_has_no_traceback(tune, folder):
    result = tune("run", "--config", "own.yaml", "fail=True")
    assert (result.code, result.err) == (2, "error: note: there is no ink.\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((), "the following arguments are required: recipe, --config"),
        (("own.py",), "The '--config' argument is required."),
        (("own.py", "--config"), "--config needs a value"),
        (("own.py", "--config", "own.yaml", "--grace", "soon"), "--grace soon: give the seconds between the signal"),
        (("own.py", "--config", "own.yaml", "--grace=0"), "--grace 0: give the seconds between the signal"),
        (("own.py", "--config", "own.yaml", "--config", "own.yaml"), "--config is given twice"),
        (("own.py", "--config", "own.yaml", "--epochs=3"), "--epochs=3: unknown option"),
        (("own.py", "--config", "own.yaml", "epochs"), "epochs: write settings as key=value"),
        (("own.py", "--config", "missing.yaml"), "there is no config 'missing.yaml'"),
        (("missing.py", "--config", "own.yaml"), "there is no recipe 'missing.py'"),
        (
            ("lora_finetune_singl_device", "--config", "own.yaml"),
            "did you mean 'lora_finetune_single_device'?",
        ),
        (("--config", "llama3_2/1B_lora_single_devise"), "did you mean 'llama3_2/1B_lora_single_device'?"),
        (
            ("--nproc-per-node", "2", "quantize", "--config", "quantization"),
            "does not support distributed training: remove torchrun's options",
        ),
        (
            ("--nproc-per-node", "2", "lora_finetune_single_device", "--config", "own.yaml"),
            "distributed training: run lora_finetune_distributed, or remove torchrun's options",
        ),
        (("own.py", "--config", "text.yaml"), "the config has 1 mistake:\n  text.yaml: must hold settings"),
        (("own.py", "--config", "mapped.yaml"), "mapped.yaml:2: recipe: must be the name or the path of a recipe"),
        (("--nproc-per-nodes", "2", "own.py", "--config", "own.yaml"), "--nproc-per-nodes: unknown option"),
        (("own.yaml",), "tune run --config own.yaml"),
        (("rows.jsonl", "--config", "own.yaml"), "rows.jsonl is not a recipe, which is a Python file"),
        (("x" * 300, "--config", "own.yaml"), "there is no recipe 'xxx"),
    ],
)
def test_invalid_command_lines_are_refused(tune, folder, command, said):
    (folder / "rows.jsonl").write_text('{"text": "red"}\n')
    result = tune("run", *command)
    assert result.code == 2
    assert said in result.err
    assert not (folder / "note_0.json").exists()


def test_config_that_names_no_recipe_is_refused(tune, folder):
    (folder / "bare.yaml").write_text("note: bare\n")
    result = tune("run", "--config", "bare.yaml")
    assert result.code == 2
    assert "it names no recipe" in result.err
    assert tune("run", "own.py", "--config", "bare.yaml").code == 0


def test_file_without_recipe_main_is_refused(tune, folder):
    (folder / "empty.py").write_text("")
    result = tune("run", "empty.py", "--config", "own.yaml", "--dry-run")
    assert result.code == 2
    assert "no function recipe_main(cfg)" in result.err


def test_dry_run_prints_the_needs_and_problems_of_a_run(tune, tmp_path):
    output = tmp_path / "run"
    nowhere = [f"checkpointer.checkpoint_dir={tmp_path}/no_model", f"tokenizer.path={tmp_path}/no_tokenizer"]
    command = ("run", "--config", "smol/135M_lora_single_device", "--dry-run", f"output_dir={output}", "device=cpu")
    result = tune(*command, *nowhere)
    assert result.code == 2
    assert "139,399,488, of which 4,884,480 are trained" in result.out
    assert result.err.startswith("error: the run cannot start, for 2 reasons:\n")
    assert "no_model" in result.err
    assert "no_tokenizer" in result.err
    assert not output.exists()
    (process,) = re.findall(r"process +about ([\d.]+) GiB: the tensors, ([\d.]+) GiB of libraries", result.out)
    (peak,) = re.findall(r"peak +([\d.]+) GiB", result.out)
    assert float(process[0]) == pytest.approx(float(peak) + float(process[1]) + 0.3, abs=0.02)


def test_dry_run_says_that_a_run_can_start(tune, tmp_path):
    config = write_config("lora_finetune_single_device", tmp_path, tmp_path / "run")
    result = tune("run", "--config", str(config), "--dry-run")
    assert (result.code, result.err.count("error")) == (0, 0)
    assert "data        24 rows, " in result.out
    assert "steps       12 = 1 epoch of 12\n" in result.out
    assert result.out.endswith("The run can start: no problem was found.\n")
    assert not (tmp_path / "run").exists()


def test_dry_run_of_a_users_recipe_checks_and_runs_nothing(tune, folder):
    result = tune("run", "--config", "own.yaml", "--dry-run")
    assert (result.code, result.out) == (0, "The run can start: no problem was found.\n")
    assert not (folder / "note_0.json").exists()


def test_a_run_on_several_processes_is_checked_before_they_start(tune, tmp_path):
    config = write_config("full_finetune_distributed", tmp_path, tmp_path / "run", tensor_parallel_dim=3)
    result = tune("run", "--nproc-per-node", "3", "--config", str(config))
    assert (result.code, result.out) == (2, "")
    error = result.err[result.err.index("error: ") :]
    assert error.startswith("error: the run cannot start, for 1 reason:\n  tensor_parallel_dim is 3: it must")
    assert error.count("\n") == 2, "nothing stands below it"


def test_without_torchrun_the_command_says_how_many_processes(tune, tmp_path):
    result = tune("run", "--config", str(write_config("full_finetune_distributed", tmp_path, tmp_path / "run")))
    assert result.code == 2
    assert "--nproc-per-node 2 full_finetune_distributed" in result.err


def test_config_of_another_recipe_is_refused(tune, tmp_path, folder):
    shipped = tune("run", "full_finetune_single_device", "--config", "smol/135M_lora_single_device")
    assert shipped.code == 2
    message = "The config is for the recipe lora_finetune_single_device, and this is full_finetune_single_device: "
    assert f"recipe: {message}" in shipped.err.splitlines()[-1]
    misspelled = tune("run", "full_finetune_single_device", "--config", "smol/135M_lora_single_device", "epochz=2")
    assert "epochz: there is no such setting" in misspelled.err
    assert misspelled.err.splitlines()[-1].startswith(message)
    config = write_config("full_finetune_distributed", tmp_path, tmp_path / "run", tensor_parallel_dim=2)
    config.write_text(config.read_text().replace("recipe: full_finetune_distributed\n", ""))
    bare = tune("run", "full_finetune_single_device", "--config", str(config))
    assert bare.code == 2
    last = "The config fits the recipe full_finetune_distributed: name it after `tune run`"
    assert bare.err.splitlines()[-1].startswith(last)
    assert "The config" not in tune("run", "--config", "own.yaml", "nte=second").err.splitlines()[-1]


def test_config_that_fits_another_recipe_is_logged(tune, tmp_path, caplog):
    config = write_config("full_finetune_single_device", tmp_path, tmp_path / "run")
    result = tune("run", "--nproc-per-node", "2", "full_finetune_distributed", "--config", str(config), "--dry-run")
    assert result.code == 0
    assert "The config is for the recipe full_finetune_single_device, and this is full_finetune_distri" in caplog.text


def test_command_line_is_split_into_its_parts():
    command = parse_command(["--nnodes", "1", "--nproc_per_node=2", "own", "a.b=c", "--dry-run", "~d", "--config", "x"])
    assert (command.recipe, command.config, command.dry_run) == ("own", "x", True)
    assert command.overrides == ["a.b=c", "~d"]
    assert parse_command(["own", "--config", "x", "--grace", "30"]).grace == 30
    long = f"dataset={{source: {'a' * 300}}}"
    assert parse_command(["own", long, "--config", "x"]).overrides == [long], "longer than the name of a file may be"
    for late in (["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--standalone"]):
        with pytest.raises(UserError, match=f"stands before the recipe: tune run {' '.join(late)} own …"):
            parse_command(["own", *late, "--config", "x", "a=1"])
        with pytest.raises(UserError, match=f"tune run {' '.join(late)} RECIPE …"):
            parse_command(["a=1", *late, "--config", "x"])
    for words in (["--nproc-per-node"], ["--standalone", "--nproc-per-node"]):
        with pytest.raises(UserError, match="--nproc-per-node: the option lacks its value"):
            parse_command([*words, "--config", "x"])
    command = parse_command(["--nproc-per-node", "2", "--config", "x"])
    assert (command.torchrun, command.recipe) == (["--nproc-per-node", "2"], None)


@pytest.mark.slow
def test_a_mistake_is_found_before_torchrun_starts(tune, folder):
    refused = tune("run", "--nproc-per-node", "2", "own.py", "--config", "own.yaml", "times=0")
    assert (refused.code, refused.out) == (2, "")


def test_validate_takes_names_paths_and_overrides(tune, folder):
    for config in ("llama3_2/1B_lora_single_device", "own.yaml"):
        result = tune("validate", config)
        assert (result.code, result.out) == (0, "Config is well-formed!\n")
    refused = tune("validate", "llama3_2/1B_lora_single_device", "optimizer.lrr=1e-4", "epochs=-1", "~output_dir")
    assert (refused.code, refused.out) == (2, "")
    assert "did you mean 'lr'?" in refused.err, "every mistake is shown, not the first one alone"
    assert "epochs" in refused.err
    assert "output_dir" in refused.err
    assert "there is no config 'nothing.yaml'" in tune("validate", "nothing.yaml").err


def test_validate_checks_components_of_a_config_without_a_recipe(tune, tmp_path):
    config = tmp_path / "parts.yaml"
    config.write_text("optimizer:\n  _component_: torch.optim.AdamW\n  lr: 1e-3\n")
    result = tune("validate", str(config))
    assert result.code == 0
    assert "It names no recipe: only components were checked" in result.out
    config.write_text("optimizer:\n  _component_: torch.optim.AdamWW\n  lr: 1e-3\n")
    result = tune("validate", str(config))
    assert result.code == 2
    assert "AdamW" in result.err
