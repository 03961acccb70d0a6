"""Garbage is looked for seldom while a program starts, and as usual from the training loop on."""

import gc

import pytest

from tests.recipes.runs import RECIPES, after_each_step, load_recipe, write_config


def test_as_usual_in_the_loop(tmp_path, monkeypatch):
    name, usual = "full_finetune_single_device", gc.get_threshold()
    note = f"import gc, pathlib; pathlib.Path({str(tmp_path)!r}, 'when').write_text(str(gc.get_threshold()))"
    start = "    training.check_run(cfg)\n"
    changes = {
        **after_each_step(note.replace("when", "looping")),
        start: f"    {note.replace('when', 'starting')}\n{start}",
    }
    recipe = load_recipe(name, tmp_path, changes)
    config = write_config(name, tmp_path, tmp_path / "output", max_steps_per_epoch=1)
    monkeypatch.setattr("sys.argv", [str(RECIPES / f"{name}.py"), "--config", str(config)])
    with pytest.raises(SystemExit):
        recipe.recipe_main()
    assert (tmp_path / "starting").read_text() == str((100_000, *usual[1:]))
    assert (tmp_path / "looping").read_text() == str(usual) == str(gc.get_threshold())
