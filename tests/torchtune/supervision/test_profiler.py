import json

import pytest
import torch

from torchtune import supervision
from torchtune.supervision import GuardedProfiler
from torchtune.utils import UserError


def test_disabled_profiler_is_a_dummy():
    profiler, used = supervision.setup_torch_profiler()
    assert isinstance(profiler, supervision.DummyProfiler)
    assert used == {"enabled": False}
    with profiler as inside:
        inside.start()
        inside.step()
        inside.stop()
    assert isinstance(supervision.profiler_from_config(None), supervision.DummyProfiler)


# torch says at the second window that the events of the first are gone: they have been written by then
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle:UserWarning")
def test_every_window_has_a_trace(tmp_path):
    profiler, used = supervision.setup_torch_profiler(
        enabled=True,
        cuda=False,
        xpu=False,
        wait_steps=1,
        warmup_steps=1,
        active_steps=1,
        num_cycles=2,
        output_dir=str(tmp_path),
        with_flops=True,
    )
    assert (used["wait_steps"], used["cpu"], used["cuda"], used["with_flops"]) == (1, True, False, True)
    with profiler:
        for _ in range(8):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["iteration_3", "iteration_6"]
    trace = json.loads((tmp_path / "iteration_3" / "rank0_trace.json").read_text())
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    assert "aten::mm" in (tmp_path / "iteration_6" / "rank0_key_averages.txt").read_text()


def test_incomplete_window_takes_all_defaults(tmp_path):
    _, used = supervision.setup_torch_profiler(enabled=True, wait_steps=1, output_dir=str(tmp_path))
    assert {name: used[name] for name in supervision.DEFAULT_SCHEDULE} == supervision.DEFAULT_SCHEDULE


def test_invalid_profiler_settings_are_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to record"):
        supervision.setup_torch_profiler(enabled=True, cpu=False, cuda=False, xpu=False, output_dir=str(tmp_path))
    with pytest.raises(UserError, match="active_steps=0 must be at least 1"):
        supervision.setup_torch_profiler(
            enabled=True, wait_steps=0, warmup_steps=0, active_steps=0, num_cycles=1, output_dir=str(tmp_path)
        )
    with pytest.raises(UserError, match=r"my\.profiler is not torchtune\.training\.setup_torch_profiler"):
        supervision.profiler_from_config({"_component_": "my.profiler"})


def test_profiler_section_of_a_config_builds_a_profiler(tmp_path):
    profiler = supervision.profiler_from_config({"enabled": True, "output_dir": str(tmp_path), "cuda": False})
    assert isinstance(profiler, GuardedProfiler)
