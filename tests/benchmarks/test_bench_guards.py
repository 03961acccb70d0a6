"""The benchmark of what guards cost runs."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_guards.py"


def test_every_guard_is_measured():
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [name for name, *_ in cells] == ["accounting", "watchdog", "steps", "norm"]
    assert all(share.endswith("%") for *_, share in cells)
