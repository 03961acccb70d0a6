"""A disk that fills while a checkpoint is written: one sentence, and what was saved before is whole."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.torchtune.checkpoints.small import (
    build,
    leave_free,
    load,
    randomize_adapter,
    same_bits,
    stored,
    write_folder,
)
from torchtune.modules.peft import LoRA
from torchtune.training import FullModelHFCheckpointer
from torchtune.utils import UserError


def save(store: FullModelHFCheckpointer, name: str, model: nn.Module, **options) -> Path:
    state = {"momentum": {"x": torch.ones(10_000)}, "progress": {"step": 1}}
    return store.save(name, model, state=state, **options)


@pytest.mark.parametrize("adapter", [False, True])
def test_full_at_any_point(disk: Path, tmp_path: Path, adapter: bool) -> None:
    folder = write_folder(tmp_path / "source")
    conversions = [LoRA(rank=2, alpha=4)] if adapter else []
    contents = ("adapter", "merged") if adapter else "model"
    model = load(folder, *conversions)
    if adapter:
        randomize_adapter(model)
    store = FullModelHFCheckpointer(folder, output_dir=disk / "run", keep_last_n_checkpoints=1)
    first = save(store, "step_1", model, contents=contents)
    before = stored(first)
    needed = sum(path.stat().st_size + 4096 for path in first.rglob("*"))
    failed = 0
    for part in range(10):
        filler = leave_free(disk, needed * part // 10)
        try:
            save(store, "step_2", model, contents=contents)
        except UserError as error:
            failed += 1
            text = str(error)
            assert "No space left" in text
            assert "free some space" in text
            assert "\n" not in text
        else:
            pytest.fail(f"{part} tenths of the space were enough")
        assert sorted(path.name for path in (disk / "run").iterdir()) == ["step_1"]
        filler.unlink()
    assert failed == 10
    assert same_bits(stored(first), before)
    # … and with room again the run goes on from there
    point = store.find_resume_point()
    assert point.path == first
    again = build(folder, *conversions)
    store.load_model(again)
    store.resume(point, again, {"momentum": {}, "progress": {}})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    save(store, "step_2", again, contents=contents)
    assert store.find_resume_point().path.name == "step_2"
