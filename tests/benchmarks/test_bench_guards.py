"""The benchmark of what guards cost runs."""

import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_guards.py"


def test_every_guard_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    cells = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [name for name, *_ in cells] == ["accounting", "watchdog", "steps", "norm"]
    assert all(share.endswith("%") for *_, share in cells)
