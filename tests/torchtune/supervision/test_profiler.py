import json
from pathlib import Path

import pytest
import torch

from torchtune import training
from torchtune.supervision._overlap import overlap_of, write_overlap
from torchtune.utils import UserError


def test_off_is_a_dummy():
    profiler, used = training.setup_torch_profiler()
    assert isinstance(profiler, training.DummyProfiler)
    assert used == {"enabled": False}
    with profiler as inside:
        inside.start()
        inside.step()
        inside.stop()
    assert isinstance(training.profiler_from_config(None), training.DummyProfiler)


# torch says at the second window that the events of the first are gone: they have been written by then
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle:UserWarning")
def test_traces_of_every_window(tmp_path):
    profiler, used = training.setup_torch_profiler(
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


def test_defaults_where_a_window_is_incomplete(tmp_path):
    _, used = training.setup_torch_profiler(enabled=True, wait_steps=1, output_dir=str(tmp_path))
    assert {name: used[name] for name in training.DEFAULT_SCHEDULE} == training.DEFAULT_SCHEDULE


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match="nothing to record"):
        training.setup_torch_profiler(enabled=True, cpu=False, cuda=False, xpu=False, output_dir=str(tmp_path))
    with pytest.raises(UserError, match="active_steps=0 must be at least 1"):
        training.setup_torch_profiler(
            enabled=True, wait_steps=0, warmup_steps=0, active_steps=0, num_cycles=1, output_dir=str(tmp_path)
        )
    with pytest.raises(UserError, match=r"my\.profiler is not torchtune\.training\.setup_torch_profiler"):
        training.profiler_from_config({"_component_": "my.profiler"})


def test_a_section_of_a_config(tmp_path):
    profiler = training.profiler_from_config({"enabled": True, "output_dir": str(tmp_path), "cuda": False})
    assert isinstance(profiler, torch.profiler.profile)


def kernel(name: str, start: float, end: float, category: str = "kernel") -> dict:
    """A complete event as torch's profiler exports it."""
    event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": end - start}
    return {**event, "args": {"stream": 7, "device": 0, "correlation": 1}}


def write_trace(path: Path, *events: dict) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": list(events)}))
    return path


def test_communication_that_nothing_hides(tmp_path):
    gather, gemm = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ampere_bf16_s16816gemm"
    trace = write_trace(
        tmp_path / "trace.json",
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        kernel("nccl:all_gather", 0, 5000, "cpu_op"),
        kernel(gemm, 1000, 1400),
        kernel(gather, 1300, 1500),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16", 1450, 1600),
        kernel(gemm, 1700, 1800),
        kernel("elementwise", 1750, 1850),
        kernel("Memcpy HtoD (Pinned -> Device)", 1850, 1900, "gpu_memcpy"),
        kernel("Memcpy PtoP", 1900, 2000, "gpu_memcpy"),
        {"ph": "i", "cat": "kernel", "name": gemm, "ts": 9000},
    )
    overlap = write_overlap(trace, tmp_path / "overlap.json")
    assert overlap.seconds == pytest.approx(1e-3)
    assert overlap.compute == pytest.approx((400 + 150) / 1000)
    assert overlap.communication == pytest.approx((300 + 100) / 1000)
    assert overlap.exposed == pytest.approx((200 + 100) / 1000)
    assert overlap.idle == pytest.approx(150 / 1000)
    assert str(overlap) == "30.0% of the time is communication alone, 10.0% is hidden behind computation, 15.0% is idle"
    assert json.loads((tmp_path / "overlap.json").read_text())["exposed"] == 0.3


def test_no_kernels_no_overlap(tmp_path):
    trace = write_trace(tmp_path / "trace.json", kernel("aten::mm", 0, 10, "cpu_op"))
    assert overlap_of(trace) is None
    assert write_overlap(trace, tmp_path / "overlap.json") is None
    assert not (tmp_path / "overlap.json").exists()
