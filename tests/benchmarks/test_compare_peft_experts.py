"""LoRA of experts has the gradients of peft on the model of transformers."""

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_peft_experts.py"


# peft wraps parameters of experts alone here, and says that it found no module.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:target_modules=.* were set but no module was matched:RuntimeWarning")
def test_gradients_are_those_of_peft(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", "--turns", "1"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    out = capsys.readouterr().out
    losses = re.findall(r"loss ([\d.]+)", out)
    assert len(losses) == 2
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5)
    (difference,) = re.findall(r"difference of gradients ([\d.e+-]+)", out)
    assert float(difference) <= 1e-5
