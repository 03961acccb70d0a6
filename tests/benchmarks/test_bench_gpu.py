"""The benchmark that needs a GPU is tried where there is none."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_gpu.py"


def test_tiny_shapes_are_measured_on_both_sides() -> None:
    arguments = ["--tiny", "--only", "llama-8b-lora", "--steps", "1", "--warmup", "1"]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(cell[0], cell[1]) for cell in cells] == [("llama-8b-lora", "ours"), ("llama-8b-lora", "transformers")]
    assert all(float(cell[2]) > 0 and float(cell[4]) > 0 for cell in cells)
