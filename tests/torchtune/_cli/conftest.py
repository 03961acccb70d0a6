"""Run `tune` inside the test process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from torchtune._cli.tune import main


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def tune(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``tune("ls")`` runs the command line and returns its exit code and output."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["tune", *map(str, arguments)])
        code: int | str | None = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Result(int(code or 0), captured.out, captured.err)

    return run
