"""Fake tensors need the memory, the FLOPs and the collectives that real ones do, counted by the same observer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.killing import launch
from tests.torchtune.estimate.measured import CASES, measure, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulate")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return measure_processes(tmp_path_factory.mktemp("real"), [item.callspec.params["name"] for item in items])


def measure_processes(folder: Path, names: list[str]) -> dict[str, Any]:
    (folder / "names.json").write_text(json.dumps(names))
    for processes in {CASES[name][0] for name in names} - {1}:
        launch("estimate.measured", processes, folder)
    results = {}
    for path in folder.glob("measured_*.json"):
        results |= json.loads(path.read_text())
    return results


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(found["peaks"]) == {"set-up", "forward", "backward", "optimizer"}
    for phase, peak in wanted["peaks"].items():
        assert found["peaks"][phase] == pytest.approx(peak, rel=0.02), phase
    assert found["flops"] == wanted["flops"]
    assert sum(wanted["flops"].values()) > 0
    assert found["traffic"] == wanted["traffic"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == 1])
def test_simulated_memory_of_one_process_equals_a_real_run(name, folder):
    check(measure(name, folder, fake=True), measure(name, folder, fake=False))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] > 1])
def test_simulated_memory_and_traffic_of_processes_equal_a_real_run(name, folder, tmp_path, real):
    simulated = measure(name, folder, fake=True)
    try:
        check(simulated, real[name])
    except AssertionError:  # gloo's threads let go of a buffer when they come to it: late where a machine is busy
        check(simulated, measure_processes(tmp_path, [name])[name])
    assert any(simulated["traffic"].values())


def test_simulation_writes_no_files_or_environment(folder):
    assert not (folder / "never").exists()
    assert "WORLD_SIZE" not in os.environ
