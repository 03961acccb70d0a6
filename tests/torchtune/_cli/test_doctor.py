"""``tune doctor`` says whether training can run here, and what will be slow."""

import os
import re
from http.server import ThreadingHTTPServer
from importlib import metadata

import pytest
import torch
from huggingface_hub import constants

from tests.serving import JSONHandler, serving
from torchtune._cli import doctor
from torchtune.modules.kernels import KERNELS


class Hub(JSONHandler):
    """Knows the token ``hf_right``; a hub in the way of the real one answers with a page."""

    def do_GET(self):
        if self.server.is_portal:
            self.reply("<html>")
        else:
            self.reply({"name": "somebody"}, 200 if self.headers.get("Authorization") == "Bearer hf_right" else 401)


@pytest.fixture
def hub(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server, serving(server):
        server.is_portal = False
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def rows(text):
    """Name -> lines of a report."""
    facts = {}
    for line in text.splitlines():
        name = line[:12].strip() or next(reversed(facts))
        facts.setdefault(name, []).append(line[12:])
    return facts


@pytest.mark.usefixtures("offline")
def test_machine_that_can_train_has_no_problems(tune, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    result = tune("doctor", "--output", str(tmp_path / "runs"))
    facts = rows(result.out)
    assert result.code == 0
    assert facts["problems"] == ["none: training can run"]
    assert torch.__version__ in facts["versions"][0]
    assert facts["disks"][0].startswith(f"runs: {tmp_path / 'runs'}, ")
    assert facts["disks"][1].startswith(f"rows: {tmp_path / 'cache' / 'rows'}, ")
    assert "offline: HF_HUB_OFFLINE is set" in facts["hub"][0]
    packages = " ".join(facts["packages"])
    assert f"tokenizers {metadata.version('tokenizers')}" in packages
    assert len(re.findall(r"(?<![\w-])transformers ", packages)) <= 1, "it is in several extras"
    assert "pytest" not in packages, "packages for development are not listed"
    assert "fla-core" not in packages, "kernels are listed on their own"
    assert [line.partition(" ")[0] for line in facts["kernels"]] == [kernel.package for kernel in KERNELS]
    assert all("used" in line for line in facts["kernels"])
    assert facts["attention"][0].startswith("documents: ")
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.usefixtures("offline")
def test_problems_are_named_and_change_the_exit_code(tune, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.3.1" if name == "torch" else version(name))
    result = tune("doctor", "--output", str(tmp_path / "file" / "runs"))
    problems = "\n".join(rows(result.out)["problems"])
    assert result.code == 1
    assert f"runs: {tmp_path / 'file'} may not be written to" in problems
    assert "torch 2.3.1, but >=2.11 is needed: pip install 'torch>=2.11'" in problems


@pytest.mark.usefixtures("offline")
def test_optional_packages_name_their_extra(monkeypatch):
    version = metadata.version

    def without_wandb(name):
        if name == "wandb":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_wandb)
    findings = doctor.Findings()
    assert "not installed: wandb (pip install 'torchtune[wandb]')" in doctor._packages(findings)
    assert not findings.problems


def test_a_checkout_that_is_not_installed_says_so(monkeypatch):
    def is_not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", is_not_installed)
    (line,) = doctor._packages(doctor.Findings())
    assert line == "not compared with the requirements of torchtune, which is not installed: pip install -e ."


@pytest.mark.usefixtures("offline")
def test_reasons_for_slow_runs_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    monkeypatch.setattr(doctor, "_file_system", lambda path: "nfs4")
    monkeypatch.setattr("torchtune.training.precision.has_fast_matmul", lambda dtype, device: dtype == torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    warnings = "\n".join(doctor.examine(tmp_path).warnings)
    assert "dtype=bf16 on cpu: emulated" in warnings
    assert "3 cores" in warnings
    assert "1 threads on 3 cores: unset or raise OMP_NUM_THREADS" in warnings
    assert f"runs: {tmp_path} is on a network file system (nfs4)" in warnings


@pytest.mark.usefixtures("offline")
def test_warnings_do_not_change_the_exit_code(tune, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_SMALL_DISK", float("inf"))
    result = tune("doctor", "--output", str(tmp_path))
    warnings = "\n".join(rows(result.out)["warnings"])
    assert result.code == 0
    assert re.search("runs: .* GiB free: a checkpoint needs", warnings)


@pytest.mark.skipif(not os.path.exists("/proc/mounts"), reason="needs /proc/mounts")
def test_the_file_system_is_that_of_the_innermost_mount():
    assert doctor._file_system(doctor.Path("/proc/self")) == "proc"


def test_access_to_the_hub_is_described(hub, tune, tmp_path, monkeypatch):
    def said(token):
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        result = tune("doctor", "--output", str(tmp_path))
        assert "hf_" not in result.out
        return rows(result.out)["hub"][0].removeprefix(constants.ENDPOINT).strip()

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert said("hf_right") == "answers, signed in as somebody"
    assert said("hf_wrong") == "refuses the token: make another"
    assert said(None) == "answers, without a token: gated models need HF_TOKEN"
    hub.is_portal = True
    assert "gives no answer of a hub" in said(None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert said(None).startswith("offline: ")
