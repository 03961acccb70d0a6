"""Weights of rows in a run."""

import pytest

from tests.recipes.killing import losses
from tests.recipes.runs import write_config
from tests.tiny import write_lines

ROWS = [
    {"messages": [{"role": "user", "content": "Where is cat 1?"}, {"role": "assistant", "content": "On mat 1."}]},
    {"messages": [{"role": "user", "content": "Who sees it?"}, {"role": "assistant", "content": "a red bird does"}]},
]


@pytest.mark.parametrize("recipe", ["full_finetune_single_device", "knowledge_distillation"])
def test_row_of_weight_two_counts_as_two_rows(recipe, tmp_path, tune):
    steps = {}
    for name, rows in (("twice", [ROWS[0], *ROWS]), ("weighted", [{**ROWS[0], "weight": 2}, ROWS[1]])):
        data = write_lines(tmp_path / f"{name}.jsonl", rows)
        settings = {"batch_size": len(rows), "epochs": 3, "dataset.data_files": str(data)}
        config = write_config(recipe, tmp_path, tmp_path / name)
        result = tune("run", recipe, "--config", config, *(f"{key}={value}" for key, value in settings.items()))
        assert result.code == 0, result.err
        steps[name] = losses(tmp_path / name)
    assert len(steps["twice"]) == 3
    assert list(steps["weighted"].values()) == pytest.approx(list(steps["twice"].values()), rel=1e-5)
