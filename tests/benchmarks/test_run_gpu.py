"""`make gpu` on a CPU: slices that go on, tasks that fail, wheels, and packages that are missing."""

import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
CASE = "qwen3-0.6b-full"


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("run_gpu")


# The driver with tasks that measure nothing; the first one takes its time where a file says so.
CHEAP = """if True:
    import json, sys
    sys.path.insert(0, {folder!r})
    import run_gpu
    said = 'RESULT ' + json.dumps(dict(eager=dict(tokens_per_second=5.0, peak_gib=1.0)))
    wait = 'import os, time; time.sleep(600 * os.path.exists(' + repr({slow!r}) + ')); '
    make = lambda name, code: run_gpu.Task(name, ['-c', code + f'print({{said!r}})'], 60)
    run_gpu.tasks = lambda *_: [make('a', wait), make('b', ''), make('c', ''), make('d', 'raise ValueError(7); ')]
    run_gpu.probe = lambda *_: ('Some-GPU-torch2.11.0', dict())
    run_gpu.main()
"""


def test_slices_resume_after_a_kill(tmp_path):
    results = tmp_path / "results"
    state = tmp_path / "state"
    slow = tmp_path / "slow"
    code = CHEAP.format(folder=str(ROOT / "benchmarks"), slow=str(slow))
    command = [sys.executable, "-c", code, "--results", str(results), "--state", str(state)]

    def call(*options):
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    slow.touch()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as killed:
        while not (state / "logs" / "a.out").exists():
            assert killed.poll() is None
            time.sleep(0.05)
        killed.send_signal(signal.SIGTERM)
        assert killed.wait(60) == 143
    assert not list(results.rglob("*.json"))
    slow.unlink()
    assert "Left: b, c, d; call make gpu again." in call("--slice", "1")
    assert "Left: c, d; call make gpu again." in call("--slice", "1")
    folder = results / "Some-GPU-torch2.11.0"
    first = (folder / "a.json").read_text()
    assert json.loads(first)["eager"] == {"tokens_per_second": 5.0, "peak_gib": 1.0}
    shutil.rmtree(results)  # as where the checkout is sent anew
    output = call("--total", "59")  # less than the limit of a task
    assert "2 of 4 done before this call" in output
    assert "Left: c, d; all calls together took" in output
    output = call()
    assert "Done: 4 of 4, 1 with an error" in output
    assert "ERROR: ValueError: 7" in output
    assert (folder / "a.json").read_text() == first
    assert "3 of 4 done before this call" in call("--again")


@pytest.mark.slow
def test_results_become_a_table(tmp_path, monkeypatch):
    results = tmp_path / "results"
    name = f"{CASE}.ours"
    options = ["--tiny", "--results", str(results), "--state", str(tmp_path / "state"), "--only", CASE, "--slice", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "run_gpu.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, f"Left: {CASE}.transformers" in done.stdout) == (0, True), done.stderr
    (path,) = results.glob(f"*/{name}.json")
    table = json.loads(path.read_text())
    assert {"eager", "host_syncs", "kernels_ms", "seconds"} <= table.keys()
    monkeypatch.syspath_prepend(ROOT / "tools")
    page = importlib.import_module("gpu_table").page(results)
    speed, kernels = page.split("   * - Qwen3 0.6B, all weights\n")[1:]
    assert speed.splitlines()[0].strip() == f"- {table['eager']['tokens_per_second']:,.0f}"
    assert f"     - {table['kernels_ms']['FeedForward']:,.1f}\n" in kernels


def test_page_shows_errors_and_sampling_speeds(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    table = importlib.import_module("gpu_table")
    assert table.page(tmp_path).startswith("Nothing was measured yet")
    eager = {"tokens_per_second": 8.0, "peak_gib": 1.0, "generate_seconds": 3.0, "generated_per_second": 4000.0}
    results = {
        "qwen3-4b-grpo-lora.ours": {"seconds": 1.0, "eager": {**eager, "train_seconds": 1.5}},
        "llama-8b-lora.transformers": {"seconds": 1.0, "error": "RuntimeError: no `kernel` for x_\n in bf16"},
        "tests.on_cuda": {
            "seconds": 1.0,
            "passed": 5,
            "skipped": 0,
            "failed": {"test_b": "x"},
            "error": "test_b failed",
        },
    }
    folder = tmp_path / "NVIDIA-H200-torch2.11.0"
    folder.mkdir()
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    page = table.page(tmp_path)
    assert "NVIDIA H200, PyTorch 2.11.0\n---------------------------\n" in page
    assert "- Qwen3 4B, GRPO step, LoRA, ours: 3.00 s of sampling (4,000 tokens/s) and 1.50 s of training." in page
    assert "- GPU tests: 5 passed, 1 failed." in page
    assert "- llama-8b-lora.transformers: ``RuntimeError: no kernel for x_ in bf16``" in page


def test_failed_task_is_recorded_as_a_result(driver, tmp_path):
    result_line = 'print("RESULT " + \'{"eager": {"peak_gib": 1.0}}\', flush=True); '
    broken = driver.measure(driver.Task("a", ["-c", result_line + "raise ValueError('no such kernel')"], 60), tmp_path)
    assert broken["error"] == "ValueError: no such kernel"
    assert broken["eager"] == {"peak_gib": 1.0}
    endless = driver.measure(driver.Task("b", ["-c", "import time; time.sleep(600)"], 1), tmp_path)
    assert endless["error"] == "it took more than 1 s"
    results = driver.Results(tmp_path / "results", tmp_path / "copies")
    for name, result in {"a": broken, "c": {"seconds": 1.0}}.items():
        results.keep(name, result)
    results.forget_failed()
    assert set(driver.Results(tmp_path / "results", tmp_path / "copies").read()) == {"c"}


def test_failed_tests_are_named_in_the_result(driver, tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\ndef test_a(): pass\n@pytest.mark.parametrize('n', ['x y'])\ndef test_b(n): assert 0\n"
    )
    options = ["-m", "pytest", str(file), "-v", "-p", "no:cacheprovider", "--color=no", f"--rootdir={tmp_path}"]
    result = driver.measure(driver.Task("tests.some", options, 120), tmp_path)
    assert (result["passed"], list(result["failed"])) == (1, ["test_b[x y]"])
    assert result["error"] == "test_b[x y] failed"
    file.write_text("import no_such_module\n")
    result = driver.measure(driver.Task("tests.some", options, 120), tmp_path)
    assert list(result["failed"]) == [str(file)] or "test_some.py" in result["error"]


def test_results_of_tests_are_kept_after_a_timeout(driver):
    output = """collecting ... collected 4 items

tests/test_some.py::test_a PASSED                                        [ 25%]
tests/test_some.py::test_b[x y] FAILED                                   [ 50%]
tests/test_some.py::test_c SKIPPED (needs two devices)                   [ 75%]
tests/test_some.py::test_d """
    assert driver.tests_of(output) == {"passed": 1, "skipped": 1, "failed": {"test_b[x y]": ""}}


def test_speeds_are_measured_before_the_tests_run(driver):
    names = [task.name for task in driver.tasks({"a": False, "b": True}, tiny=False, only=None)]
    assert names[:4] == ["a.ours", "b.ours", "a.transformers", "b.transformers"]
    assert {name.partition(".")[0] for name in names[4:]} == {"tests"}


def test_gpu_test_tasks_are_listed_once(driver):
    names = {task.name for task in driver.test_tasks()}
    assert {"tests.on_cuda", "tests.models_on_cuda", "tests.activations"} <= names
    assert len(names) == len(list(driver.test_tasks()))


# Finds no package that the library needs elsewhere, then builds what is measured.
BUILD_WITHOUT_PACKAGES = """if True:
    import importlib.abc, sys
    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition('.')[0] in {missing!r}:
                raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
    sys.meta_path.insert(0, Missing())
    sys.path.insert(0, 'benchmarks')
    import torch
    from gpu_cases import CASES
    from gpu_sides import SIDES
    for case in CASES.values():
        SIDES['ours'](case.shrunk(), True, torch.device('cpu'), 'stochastic_rounding')
"""


def test_cases_need_only_the_packages_that_are_named(driver):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in project["dependencies"]}
    missing = packages - {package.lower() for package in driver.NEEDED.values()} - {"jinja2", "filelock"}  # torch's
    assert "tiktoken" in missing
    code = BUILD_WITHOUT_PACKAGES.format(missing=missing)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_missing_packages_are_installed_from_wheels(driver, tmp_path, monkeypatch, capsys):
    wheels = tmp_path / "wheels"
    state = tmp_path / "state"
    wheels.mkdir()
    with pytest.raises(SystemExit, match=r"there is no wheel \(\*.whl\)"):
        driver.install(wheels, state)
    info = "carried_thing-1.0.dist-info"
    with zipfile.ZipFile(wheels / "carried_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_thing.py", "VALUE = 7\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (wheels / "torch-2.0.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"hides the torch of the machine")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(driver, "NEEDED", {"carried_thing": "carried-thing"})
    with pytest.raises(SystemExit, match=r"make gpu needs carried-thing, which .* bring a wheel of each"):
        driver.check_packages(state)
    driver.install(wheels, state)
    assert "Left alone: torch-2.0.0" in capsys.readouterr().out
    assert driver.python(state, "-c", "import carried_thing; print(carried_thing.VALUE)") == "7\n"
    assert not list((state / "site").glob("torch*"))
    monkeypatch.setattr(driver, "OPTIONAL", {"no_such_module": ("no-such", "nothing is compared")})
    assert driver.check_packages(state) == {"no_such_module"}
    assert "Without no-such, nothing is compared (bring its wheel" in capsys.readouterr().out
    driver.install(wheels, state)
    assert "Unpacked" not in capsys.readouterr().out
