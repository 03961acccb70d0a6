"""What a command may load, and how long it may take."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "numpy",
    "omegaconf",
    "huggingface_hub",
    "datasets",
    "transformers",
    "tokenizers",
    "pandas",
    "pyarrow",
)
COMMANDS = {
    "help": ["--help"],
    "ls": ["ls"],
    "cat": ["cat", "llama3_2/1B_lora_single_device"],
    "cp": ["cp", "lora_finetune_single_device", "mine.py"],
    "run help": ["run", "--help"],
}


def cpu_seconds(command: list[str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_small_command_is_light(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys, torchtune._cli.tune as tune\n"
        f"sys.argv = ['tune', *{arguments!r}]\n"
        "try:\n    tune.main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr == "[]\n"
    command = [sys.executable, "-m", "torchtune._cli.tune", *arguments]
    # The least of three: what else the machine does can only add.
    assert min(cpu_seconds(command, tmp_path) for _ in range(3)) < 0.3
