"""Run the GPU benchmark and GPU tests in slices that go on where they stopped (make gpu).

    make gpu                            # nine minutes of work; call it until nothing remains
    make gpu WHEELS=folder              # with packages from a folder of wheels, for machines without a network
    make gpu AGAIN=1                    # measure failed tasks again
    python benchmarks/run_gpu.py --tiny --results /tmp/results      # tiny shapes on a CPU, to see that it runs

Every side of a benchmark case, and then every file of GPU tests, is a process with a time limit. Its result is one
file, benchmarks/results/DEVICE-torchVERSION/NAME.json, written at once; an error is a result too. A copy stays in
.gpu/, which git ignores: a checkout that is sent anew to the machine between two calls does not start from the
beginning.
Missing packages are named, with the consequence; torchtune is used from the checkout.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STATE = ROOT / ".gpu"
RESULTS = ROOT / "benchmarks" / "results"
LIMIT = 240  # seconds of a task
# Required to import the models, losses and samplers of the library: module -> package.
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "yaml": "PyYAML",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "tqdm": "tqdm",
}
# Module -> (package, consequence of its absence).
OPTIONAL = {
    "pytest": ("pytest", "the GPU tests are not run"),
    "omegaconf": ("omegaconf", "GPU tests that read a config are not run"),
    "datasets": ("datasets", "GPU tests that read a config are not run"),
    "transformers": ("transformers", "there is no comparison with transformers"),
    "peft": ("peft", "cases with adapters are not compared with transformers and peft"),
}
# Wheels that would shadow the torch of the machine.
NEVER = re.compile(r"(torch|triton|nvidia_\w+|torchvision|torchaudio)-\d")


@dataclasses.dataclass(frozen=True)
class Task:
    """One process, and one result.

    Attributes:
        name: of the result's file.
        command: arguments after the Python interpreter.
        limit: seconds.
        needs: modules without which it is left out.
    """

    name: str
    command: list[str]
    limit: int
    needs: tuple[str, ...] = ()


def tasks(cases: dict[str, bool], tiny: bool, only: str | None) -> list[Task]:
    """All tasks: our speed, that of transformers, then the tests, because a GPU may be there for minutes only.

    ``cases`` maps each name, the most valuable first, to whether the case has adapters.
    """
    if only:
        unknown = set(only.split(",")) - {*cases, "tests"}
        if unknown:
            raise SystemExit(f"--only has {', '.join(sorted(unknown))}: choose from tests, {', '.join(cases)}.")
        cases = {name: about for name, about in cases.items() if name in only.split(",")}
    found = []
    options = ["--tiny"] if tiny else []
    for side in ("ours", "transformers"):
        for name, lora in cases.items():
            needs = () if side == "ours" else ("transformers", "peft") if lora else ("transformers",)
            command = ["benchmarks/bench_gpu.py", name, side, "--seconds", str(LIMIT), *options]
            found.append(Task(f"{name}.{side}", command, LIMIT, needs))
    if not only or "tests" in only.split(","):
        found += test_tasks()
    return found


def test_tasks() -> Iterator[Task]:
    """A task for each file with tests that are marked ``gpu``."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.gpu" in path.read_text(encoding="utf-8"):
            name = path.relative_to(ROOT).as_posix()
            # Other releases of packages may have other warnings, which are errors in the suite.
            options = ["-m", "gpu", "-v", "--tb=short", "-o", "filterwarnings=default", "--color=no"]
            reads_configs = "settings(" in path.read_text(encoding="utf-8")
            needs = ("pytest", "omegaconf", "datasets") if reads_configs else ("pytest",)
            yield Task(f"tests.{path.stem.removeprefix('test_')}", ["-m", "pytest", name, *options], LIMIT, needs)


def environment(state: Path) -> dict[str, str]:
    """The environment of a task: the checkout, then packages from wheels, before what is installed."""
    paths = [str(ROOT), str(state / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}


def python(state: Path, *arguments: str) -> str:
    """The output of a short Python process. Raises SystemExit with the last line of its errors."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment(state), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"make gpu cannot start: {last_line(done.stderr)}")
    return done.stdout


def install(wheels: Path, state: Path) -> None:
    """Unpack wheels into a folder of the checkout, unless it holds these already.

    Raises:
        SystemExit: there is no wheel, or pip refuses one.
    """
    found = sorted(path for path in wheels.glob("*.whl") if not NEVER.match(path.name))
    left = sorted(path.name for path in wheels.glob("*.whl") if NEVER.match(path.name))
    if left:
        say(f"Left alone: {', '.join(left)}. The torch of this machine is the one to measure.")
    if not found:
        raise SystemExit(f"WHEELS={wheels}: there is no wheel (*.whl) in this folder.")
    marker, wanted = state / "site.json", [[path.name, path.stat().st_size] for path in found]
    if marker.exists() and json.loads(marker.read_text()) == wanted:
        return
    shutil.rmtree(state / "site", ignore_errors=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-cache-dir", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(state / "site"), *map(str, found)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"WHEELS={wheels}: pip says: {last_line(done.stderr)}")
    write(marker, wanted)
    say(f"Unpacked {len(found)} wheels into {state}/site.")


def missing_modules(state: Path) -> set[str]:
    """Modules that are not installed; a package that is there but broken shows when a task imports it."""
    importlib.invalidate_caches()
    sys.path[:0] = [str(state / "site")]
    return {name for name in (*NEEDED, *OPTIONAL) if importlib.util.find_spec(name) is None}


def check_packages(state: Path) -> set[str]:
    """Name missing packages and the consequences. Raises SystemExit if nothing can be measured."""
    missing = missing_modules(state)
    hard = [package for name, package in NEEDED.items() if name in missing]
    if hard:
        raise SystemExit(
            f"{sys.executable} has no torch: name the Python that has it, for example make gpu PYTHON=python3."
            if "torch" in hard
            else f"make gpu needs {', '.join(hard)}, which {sys.executable} does not have: bring a wheel of each in a "
            "folder and call make gpu WHEELS=folder."
        )
    for name, (package, cost) in OPTIONAL.items():
        if name in missing:
            say(f"Without {package}, {cost} (bring its wheel: WHEELS=folder).")
    return missing


def probe(state: Path, tiny: bool) -> tuple[str, dict[str, bool]]:
    """Name of the folder of results, and the cases. Raises SystemExit without a GPU."""
    code = """if True:
        import json, sys, torch
        sys.path.insert(0, "benchmarks")
        from gpu_cases import CASES
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        print(json.dumps([name, torch.__version__, {name: case.lora for name, case in CASES.items()}]))
    """
    device, version, cases = json.loads(python(state, "-c", code).splitlines()[-1])
    if not device and not tiny:
        raise SystemExit("make gpu needs a CUDA GPU, and torch finds none; benchmarks/run_gpu.py --tiny tries a CPU.")
    version = version.partition("+")[0]
    return re.sub(r"[^\w.+-]+", "-", f"{'CPU-tiny' if tiny else device}-torch{version}"), cases


class Results:
    """Results of a device: a file each, and a copy of each in a folder that git ignores.

    Args:
        folder: of the files.
        copies: of their copies.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies = folder, copies
        for path in copies.glob("*.json"):
            if not (folder / path.name).exists():
                write(folder / path.name, json.loads(path.read_text()))

    def read(self) -> dict[str, dict[str, Any]]:
        """All results by name of the task."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))}

    def keep(self, name: str, result: dict[str, Any]) -> None:
        """Write one."""
        for folder in (self.copies, self.folder):
            write(folder / f"{name}.json", result)

    def forget_failed(self) -> None:
        """Remove results with an error."""
        for name, result in self.read().items():
            if "error" in result:
                for folder in (self.copies, self.folder):
                    (folder / f"{name}.json").unlink(missing_ok=True)


def write(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def measure(task: Task, state: Path) -> dict[str, Any]:
    """Run a task to its end or its limit."""
    logs, start = state / "logs", time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    streams = logs / f"{task.name}.out", logs / f"{task.name}.err"
    with streams[0].open("w") as out, streams[1].open("w") as err:
        command = [sys.executable, *task.command]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(state),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            preexec_fn=os.setpgrp,
        )
        try:
            code = process.wait(task.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - start
    said, errors = (path.read_text(errors="replace") for path in streams)
    result: dict[str, Any] = {"seconds": round(seconds, 1)}
    for line in said.split("\n")[:-1]:
        if line.startswith("RESULT "):
            result |= json.loads(line.removeprefix("RESULT "))
    if task.name.startswith("tests."):
        result |= tests_of(said)
    if code is None or code == -signal.SIGALRM:
        result["error"] = f"it took more than {task.limit} s"
    elif code and "failed" not in result:
        result["error"] = last_line(errors) or last_line(said) or f"exit code {code}"
    elif code:
        result["error"] = f"{', '.join(result['failed'])} failed" if result["failed"] else last_line(said)
    return result


def tests_of(said: str) -> dict[str, Any]:
    """Numbers of passed and skipped tests, and names of failed ones, from the verbose output of pytest.

    The output may end in the middle: tests that ran before their file took too long count.
    """
    outcomes = re.findall(r"^\S+?\.py::(.+?) (PASSED|FAILED|SKIPPED|ERROR)(?: |$)", said, re.MULTILINE)
    reasons = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py)(?:::(.+?))?(?: - (.*))?$", said, re.MULTILINE)
    failed = {name: "" for name, outcome in outcomes if outcome in ("FAILED", "ERROR")}
    for path, name, reason in reasons:
        failed[name or path] = reason
    return {
        "passed": sum(outcome == "PASSED" for _, outcome in outcomes),
        "skipped": sum(outcome == "SKIPPED" for _, outcome in outcomes),
        "failed": failed,
    }


def last_line(text: str) -> str:
    """The last line that names an error, or else the last line; long ones are cut."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return (errors or lines or [""])[-1][:300]


def summary(name: str, result: dict[str, Any]) -> str:
    """One line about a result."""
    parts = []
    if "passed" in result:
        parts.append(f"{result['passed']} passed, {len(result['failed'])} failed, {result['skipped']} skipped")
    for stage in ("eager", "compiled"):
        if found := result.get(stage):
            parts.append(f"{stage} {found['tokens_per_second']:,.0f} tok/s, {found['peak_gib']:.1f} GiB")
    if "error" in result:
        parts.append(f"ERROR: {result['error']}")
    return f"{name:32} {result['seconds']:5.0f} s  {'; '.join(parts)}"


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def run(arguments: argparse.Namespace) -> None:
    """One slice."""
    deadline = time.monotonic() + arguments.slice
    arguments.state = arguments.state.resolve()  # tasks run in another folder
    if arguments.wheels:
        install(arguments.wheels, arguments.state)
    missing = check_packages(arguments.state)
    device, cases = probe(arguments.state, arguments.tiny)
    results = Results(arguments.results / device, arguments.state / "results" / device)
    if arguments.again:
        results.forget_failed()
    known = tasks(cases, arguments.tiny, arguments.only)
    possible = [task for task in known if not missing.intersection(task.needs)]
    done = results.read()
    spent = sum(done[task.name]["seconds"] for task in possible if task.name in done)
    say(f"{device}: {sum(task.name in done for task in possible)} of {len(possible)} done before this call.")
    why, ran = None, False
    for task in possible:
        if task.name in done:
            continue
        if spent + task.limit > arguments.total:
            why = f"all calls together took {spent:.0f} of {arguments.total} s: make gpu TOTAL=… allows more"
            break
        if ran and time.monotonic() + task.limit > deadline:
            why = "call make gpu again"
            break
        result = measure(task, arguments.state)
        results.keep(task.name, result)
        done[task.name], ran = result, True
        spent += result["seconds"]
        say(summary(task.name, result))
    left = [task.name for task in possible if task.name not in done]
    failed = [task.name for task in possible if "error" in done.get(task.name, {})]
    if failed:
        say(f"Their logs are in {arguments.state / 'logs'}.")
    say(f"Done: {len(possible) - len(left)} of {len(possible)}, {len(failed)} with an error, {spent:.0f} s in all.")
    if left:
        say(f"Left: {', '.join(left)}; {why}.")
    else:
        say(
            f"Results are in {arguments.results}: commit them, and make configs writes the page of them (docs/gpu.rst)."
        )


def main() -> None:
    """Parse, and end the running task if this process is asked to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to unpack")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--state", type=Path, default=STATE, help="folder of logs, unpacked wheels and copies")
    parser.add_argument("--slice", type=int, default=540, help="seconds of this call")
    parser.add_argument("--total", type=int, default=1700, help="seconds of all calls")
    parser.add_argument("--only", help="cases, or tests, separated by commas")
    parser.add_argument("--again", action="store_true", help="also what failed")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, only to try it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run(parser.parse_args())


if __name__ == "__main__":
    main()
