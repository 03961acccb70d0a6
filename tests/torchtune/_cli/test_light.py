"""What a command may load, and how much it may do."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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
    "ls all": ["ls", "--all"],
    "ls words": ["ls", "qwen3", "8B", "lora", "single_device"],
    "cat": ["cat", "llama3_2/1B_lora_single_device"],
    "cp": ["cp", "lora_finetune_single_device", "mine.py"],
    "run help": ["run", "--help"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS.keys())
def test_small_command_loads_no_heavy_package(arguments, tmp_path):
    code = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.work import at_most\n"
        f"sys.argv = ['tune', *{arguments!r}]\n"
        "with at_most(600_000):\n    import torchtune._cli.tune as tune\n"
        "    try:\n        tune.main()\n    except SystemExit:\n        pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "[]\n"
