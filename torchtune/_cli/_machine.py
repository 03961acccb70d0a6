"""State of this machine, for ``tune doctor``."""

import os
import platform
import shutil
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from torchtune._hub import describe_access, hub_cache
from torchtune.datasets import cache_path
from torchtune.modules.attention_utils import attention_limits, describe_attention
from torchtune.modules.kernels import KERNELS, describe_kernels
from torchtune.training.precision import has_fast_matmul
from torchtune.utils import UserError, find_device, first_line, get_device_support, has_cpp_compiler

_DEVELOPMENT = {"test", "docs", "bench"}  # extras that runs do not use
_NETWORK = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "beegfs", "gpfs", "glusterfs", "fuse.sshfs", "afs")
_SMALL_DISK = 10 * 2**30
_FEW_CORES = 4


@dataclass
class Findings:
    """Facts by name, reasons for slow runs, and problems that prevent training."""

    facts: list[tuple[str, list[str]]] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(output: Path) -> Findings:
    """Examine this machine; ``output`` is the folder for runs."""
    found = Findings()
    device = torch.device(get_device_support().device_type)
    found.facts = [
        ("versions", [f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"]),
        ("devices", _devices(found)),
        ("memory", _memory()),
        ("disks", _disks(output, found)),
        ("packages", _packages(found)),
        ("attention", describe_attention(device)),
        ("kernels", describe_kernels(device)),
        ("hub", [describe_access()]),
    ]
    return found


def _devices(found: Findings) -> list[str]:
    kind = get_device_support().device_type
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    capability = torch.backends.cpu.get_cpu_capability()
    lines = [f"cpu: {cores} cores, torch computes on {torch.get_num_threads()} threads with {capability}"]
    if kind == "cpu":
        _explain_slow_cpu(cores, found)
    names = [kind] if kind in ("cpu", "mps") else [f"{kind}:{i}" for i in range(getattr(torch, kind).device_count())]
    for name in names:
        try:
            device = find_device(name)
            if kind == "cuda":
                facts = torch.cuda.get_device_properties(device)
                major, minor = facts.major, facts.minor
                lines.append(f"{name}: {facts.name}, {facts.total_memory / 2**30:.1f} GiB, compute {major}.{minor}")
                lines.append(f"{name}: {attention_limits(device)}")
            _try_step(device)
        except (RuntimeError, UserError) as error:
            found.problems.append(f"{name}: a small training step fails: {first_line(error)}")
            continue
        emulated = [text for text in ("bfloat16", "float16") if not has_fast_matmul(getattr(torch, text), device)]
        lines.append(f"{name}: a small training step works; {' and '.join(emulated) or 'no dtype'} emulated")
        if "bfloat16" in emulated:
            found.slow.append(f"dtype=bf16 on {name}: emulated, several times slower than others: leave dtype out")
    return lines


def _try_step(device: torch.device) -> None:
    """Run forward and backward of one matrix product."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    if not torch.isfinite(weight.grad).all():
        raise RuntimeError("its gradient is not finite")


def _explain_slow_cpu(cores: int, found: Findings) -> None:
    found.slow.append("training without a GPU: choose models of less than a billion parameters")
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        build = "a build without CUDA" if torch.version.cuda is None else "a build that the driver does not support"
        found.slow.append(f"the NVIDIA GPU is not used: torch {torch.__version__} is {build}")
    if cores < _FEW_CORES:
        found.slow.append(f"{cores} cores: tokenizing and training share them")
    if torch.get_num_threads() < cores:
        found.slow.append(f"{torch.get_num_threads()} threads on {cores} cores: unset or raise OMP_NUM_THREADS")
    if not has_cpp_compiler():
        found.slow.append("compile=True cannot run on this CPU: there is no C++ compiler: install g++")


def _memory() -> list[str]:
    if not hasattr(os, "sysconf"):
        return ["not known on this system"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    limited = f", of which this container may use {int(text) / 2**30:.1f} GiB" if text.isdigit() else ""
    return [f"{total:.1f} GiB{limited}"]


def _disks(output: Path, found: Findings) -> list[str]:
    lines = []
    for use, folder in (("runs", output), ("rows", cache_path()), ("hub", hub_cache())):
        folder = folder.absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free, kind = shutil.disk_usage(there).free, _file_system(there)
        lines.append(f"{use}: {folder}, {free / 2**30:.1f} GiB free{f', {kind}' if kind else ''}")
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            found.problems.append(f"{use}: {there} may not be written to: choose another folder")
        elif free < _SMALL_DISK:
            found.slow.append(f"{use}: {free / 2**30:.1f} GiB free: a checkpoint needs 2 bytes a parameter or more")
        if kind.startswith(_NETWORK):
            found.slow.append(f"{use}: {folder} is on a network file system ({kind}): choose a local disk")
    return lines


def _file_system(path: Path) -> str:
    """Return the file system type of an existing path, or an empty string if it is unknown."""
    mounts = Path("/proc/mounts")
    if not mounts.is_file():
        return ""
    rows = [line.split() for line in mounts.read_text().splitlines()]
    above = [(len(row[1]), row[2]) for row in rows if path.resolve().is_relative_to(row[1].replace("\\040", " "))]
    return max(above, key=lambda pair: pair[0])[1] if above else ""


def _packages(found: Findings) -> list[str]:
    """Compare the installed packages with the requirements of the library and its extras."""
    names = metadata.metadata("torchtune").get_all("Provides-Extra") or ()
    kernels = {kernel.package for kernel in KERNELS}  # listed on their own
    installed, missing = [], defaultdict(list)
    for text in metadata.requires("torchtune") or ():
        need = Requirement(text)
        is_optional = need.marker is not None and not need.marker.evaluate({"extra": ""})
        extras = {name for name in names if need.marker.evaluate({"extra": name})} if is_optional else set()
        if need.name == "torchtune" or need.name in kernels or (extras and extras <= _DEVELOPMENT):
            continue
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            version = None
        wrong = version is not None and not need.specifier.contains(version, prereleases=True)
        if wrong or (version is None and not extras):
            how = f"pip install '{need.name}{need.specifier}'"
            found.problems.append(f"{need.name} {version or 'is missing'}, but {need.specifier} is needed: {how}")
        elif version is None:
            missing[min(extras - _DEVELOPMENT)].append(need.name)
        else:
            installed.append(f"{need.name} {version}")
    return [
        *textwrap.wrap(", ".join(dict.fromkeys(installed)), 100),
        *(f"not installed: {', '.join(n)} (pip install 'torchtune[{e}]')" for e, n in missing.items()),
    ]
