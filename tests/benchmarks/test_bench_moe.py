"""What experts cost grows with the tokens that choose them, not with their number."""

import itertools
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_moe.py"


def test_unselected_experts_cost_no_operations(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", "--turns", "1"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    operations = {(int(row[0]), row[1]): float(row[2]) for row in rows if row[1] != "kernel"}
    assert operations.keys() == set(itertools.product((8, 16), ("dense", "sorted", "all")))
    for experts in (8, 16):  # a half more, for the router
        assert operations[experts, "dense"] <= operations[experts, "sorted"] <= 1.5 * operations[experts, "dense"]
        assert operations[experts, "all"] >= 3 * operations[experts, "sorted"]
