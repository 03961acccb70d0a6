# ruff: noqa: E501 (messages and tables stand in one piece)
"""Recipes run from a command line, in processes of their own."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchtune.config.assets import typed_recipe
from torchtune.config import parse

ROOT = Path(__file__).parents[3]
ASSETS = Path("tests/torchtune/config/assets")


def run(recipe: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ASSETS / recipe), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})


def test_a_recipe_runs_and_what_it_returns_is_the_exit_code():
    done = run("typed_recipe.py", "batch_size=5", f"--config={ASSETS / 'typed.yaml'}", "optimizer.lr=1e-4", "epochs=33")
    assert (done.returncode, done.stdout, done.stderr) == (3, "batch_size=5 lr=0.0001\n", "")


def test_mistakes_are_printed_without_a_traceback():
    done = run("typed_recipe.py", "--config", str(ASSETS / "typed.yaml"), "bach_size=5", "optimizer.lr=-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: the config has 2 mistakes:",
        "  command line: bach_size: there is no such setting; did you mean 'batch_size'?",
        "  command line: optimizer.lr: must be >= 0, not -1.0",
    ]


def test_command_without_a_config_is_refused():
    done = run("typed_recipe.py", "batch_size=5")
    assert done.returncode == 2
    assert "command line: --config: name a config: --config FILE_OR_NAME" in done.stderr


def test_help_prints_usage_and_settings():
    done = run("typed_recipe.py", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(
        "usage: typed_recipe.py --config FILE_OR_NAME [key=value ...] [~key ...]\n\nSettings of"
    )
    assert "  seed: int or null >= 0 (default: null)" in done.stdout


def test_too_many_open_files_end_a_run_with_one_line(monkeypatch, capsys):
    @parse
    def recipe_main(cfg: typed_recipe.Settings) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limit[1]))
        try:
            os.open("data.json", os.O_RDONLY)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)

    monkeypatch.setattr(sys, "argv", ["recipe.py", "--config", str(ROOT / ASSETS / "typed.yaml")])
    with pytest.raises(SystemExit) as caught:
        recipe_main()
    assert caught.value.code == 2
    assert "data.json cannot be opened: too many files are open" in capsys.readouterr().err


def test_a_recipe_can_be_called_with_settings():
    assert parse(lambda cfg: cfg + 1)(3) == 4


def test_importing_and_checking_load_no_torch():
    code = (
        "import sys; import torchtune.config as c; from torchtune.config import parse, instantiate, Component, validate;"
        f"from tests.torchtune.config.assets import typed_recipe as r; c.load_and_check('{ASSETS}/typed.yaml', [], r.recipe_main);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
