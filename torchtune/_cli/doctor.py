"""``tune doctor``: devices, memory, disks, packages and access to the hub of this machine."""

import argparse
import os
import platform
import shutil
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune._cli.subcommand import Subcommand
from torchtune._hub import describe_access, hub_cache
from torchtune.utils import UserError, check_writable_folder, first_line

if TYPE_CHECKING:
    import torch

_DEVELOPMENT = {"test", "docs", "bench"}  # extras that runs do not use
_NETWORK = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "beegfs", "gpfs", "glusterfs", "fuse.sshfs", "afs")
_SMALL_DISK = 10 * 2**30
_FEW_CORES = 4


class Doctor(Subcommand):
    """Subcommand that reports devices, packages and disks of this machine, warnings and problems."""

    name = "doctor"
    help = "Check devices, packages, disks and the hub, and name what will be slow"
    description = (
        "Check this machine: devices, memory, disks, packages and access to the hub. Nothing is\n"
        "downloaded. The exit code is 0 if training can run, else 1."
    )
    epilog = """
        examples:
          $ tune doctor
          $ tune doctor --output /shared/runs
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("--output", type=Path, default=Path("/tmp"), help="folder for runs (/tmp)")

    def _run(self, args: argparse.Namespace) -> None:
        from torchtune.config import redact_secrets

        findings = examine(args.output.expanduser())
        for name, texts in (
            *findings.facts,
            ("warnings", findings.warnings or ["none"]),
            ("problems", findings.problems or ["none: training can run"]),
        ):
            label = name
            for text in texts:
                print(f"{label:<12}{redact_secrets(text)}")
                label = ""  # only the first line has it
        sys.stdout.flush()
        if findings.problems:
            sys.exit(1)


@dataclass
class Findings:
    """Facts by name, warnings of what is slow, small or cannot run, and problems that prevent training."""

    facts: list[tuple[str, list[str]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(output: Path) -> Findings:
    """Examine this machine; ``output`` is the folder for runs.

    Each part returns lines about the machine, and adds its warnings and problems to the findings.
    """
    import torch

    from torchtune.modules.kernels import describe_kernels
    from torchtune.modules.kernels.attention import describe_attention
    from torchtune.utils import get_device_support

    findings = Findings()
    device = torch.device(get_device_support().device_type)
    findings.facts = [
        ("versions", [f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"]),
        ("devices", _devices(findings)),
        ("memory", _memory()),
        ("disks", _disks(output, findings)),
        ("packages", _packages(findings)),
        ("attention", describe_attention(device)),
        ("kernels", describe_kernels(device)),
        ("hub", [describe_access()]),
    ]
    return findings


def _devices(findings: Findings) -> list[str]:
    """Run a small training step on each device, and describe the devices."""
    import torch

    from torchtune.modules.kernels.attention import attention_limits
    from torchtune.training.precision import has_fast_matmul
    from torchtune.utils import find_device, get_device_support

    kind = get_device_support().device_type
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    capability = torch.backends.cpu.get_cpu_capability()
    lines = [f"cpu: {cores} cores, torch computes on {torch.get_num_threads()} threads with {capability}"]
    if kind == "cpu":
        _warn_of_slow_cpu(cores, findings)
    if kind in ("cpu", "mps"):  # one device without a number
        names = [kind]
    else:
        names = [f"{kind}:{index}" for index in range(getattr(torch, kind).device_count())]
    for name in names:
        try:
            device = find_device(name)
            if kind == "cuda":
                gpu = torch.cuda.get_device_properties(device)
                memory = f"{gpu.total_memory / 2**30:.1f} GiB"
                lines.append(f"{name}: {gpu.name}, {memory}, compute {gpu.major}.{gpu.minor}")
                lines.append(f"{name}: {attention_limits(device)}")
            _try_step(device)
        except (RuntimeError, UserError) as error:
            findings.problems.append(f"{name}: a small training step fails: {first_line(error)}")
            continue
        emulated = [text for text in ("bfloat16", "float16") if not has_fast_matmul(getattr(torch, text), device)]
        lines.append(f"{name}: a small training step works; {' and '.join(emulated) or 'no dtype'} emulated")
        if "bfloat16" in emulated:
            findings.warnings.append(
                f"dtype=bf16 on {name}: emulated, several times slower than others: leave dtype out"
            )
    return lines


def _try_step(device: "torch.device") -> None:
    """Run forward and backward of one matrix product."""
    import torch

    weight = torch.ones(8, 8, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    if not torch.isfinite(weight.grad).all():
        raise RuntimeError("its gradient is not finite")


def _warn_of_slow_cpu(cores: int, findings: Findings) -> None:
    """Warn of what makes training on this CPU slow, and of a GPU that is not used."""
    import torch

    from torchtune.utils import has_cpp_compiler

    findings.warnings.append("training without a GPU: choose models of less than a billion parameters")
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        build = "a build without CUDA" if torch.version.cuda is None else "a build that the driver does not support"
        findings.warnings.append(f"the NVIDIA GPU is not used: torch {torch.__version__} is {build}")
    if cores < _FEW_CORES:
        findings.warnings.append(f"{cores} cores: tokenizing and training share them")
    if torch.get_num_threads() < cores:
        findings.warnings.append(f"{torch.get_num_threads()} threads on {cores} cores: unset or raise OMP_NUM_THREADS")
    if not has_cpp_compiler():
        findings.warnings.append("compile=True cannot run on this CPU: there is no C++ compiler: install g++")


def _memory() -> list[str]:
    """Describe the memory of this machine, and the limit of the container, if it has one."""
    if not hasattr(os, "sysconf"):  # on Windows
        return ["not known on this system"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    line = f"{total:.1f} GiB"
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():  # otherwise "max"
            line += f", of which this container may use {int(text) / 2**30:.1f} GiB"
    return [line]


def _disks(output: Path, findings: Findings) -> list[str]:
    """Describe the disks of runs, of cached rows, and of downloaded models."""
    from torchtune.datasets import cache_path

    lines = []
    for use, folder in (("runs", output), ("rows", cache_path()), ("hub", hub_cache())):
        folder = folder.absolute()
        # The folder may not be there yet: the disk is that of the nearest folder above it.
        existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        free = shutil.disk_usage(existing).free
        kind = _file_system(existing)
        line = f"{use}: {folder}, {free / 2**30:.1f} GiB free"
        if kind:
            line += f", {kind}"
        lines.append(line)
        try:
            check_writable_folder(folder)
        except OSError as error:
            reason = f"{existing} may not be written to ({error.strerror})"
            findings.problems.append(f"{use}: {reason}: choose another folder")
        if free < _SMALL_DISK:
            findings.warnings.append(
                f"{use}: {free / 2**30:.1f} GiB free: a checkpoint needs 2 bytes a parameter or more"
            )
        if kind.startswith(_NETWORK):
            findings.warnings.append(f"{use}: {folder} is on a network file system ({kind}): choose a local disk")
    return lines


def _file_system(path: Path) -> str:
    """Return the file system type of an existing path, or an empty string if it is unknown."""
    mounts = Path("/proc/mounts")
    if not mounts.is_file():
        return ""
    file_system = ""
    longest = 0
    for line in mounts.read_text().splitlines():
        _, mount_point, kind, *_ = line.split()
        # Of the mount points above the path, the innermost one, which has the longest path, has its files.
        if path.resolve().is_relative_to(mount_point.replace("\\040", " ")) and len(mount_point) > longest:
            file_system = kind
            longest = len(mount_point)
    return file_system


def _packages(findings: Findings) -> list[str]:
    """Compare the installed packages with the requirements of the library and its extras."""
    from importlib import metadata

    from packaging.requirements import Requirement

    from torchtune.modules.kernels import KERNELS

    try:
        library = metadata.distribution("torchtune")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return ["not compared with the requirements of torchtune, which is not installed: pip install -e ."]
    names = library.metadata.get_all("Provides-Extra") or ()
    kernels = {kernel.package for kernel in KERNELS}  # listed on their own
    installed: list[str] = []
    missing: dict[str, list[str]] = defaultdict(list)  # extra -> its packages
    for text in library.requires or ():
        requirement = Requirement(text)
        extras = set()  # the extras that need it; none if the library itself does
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            extras = {name for name in names if requirement.marker.evaluate({"extra": name})}
        # An extra may require other extras of torchtune itself, whose packages are listed, too.
        if requirement.name == "torchtune" or requirement.name in kernels or (extras and extras <= _DEVELOPMENT):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        # With prereleases, because a nightly build of torch is newer than the release that is required.
        is_other_version = version is not None and not requirement.specifier.contains(version, prereleases=True)
        if is_other_version or (version is None and not extras):
            state = version or "is missing"
            command = f"pip install '{requirement.name}{requirement.specifier}'"
            findings.problems.append(f"{requirement.name} {state}, but {requirement.specifier} is needed: {command}")
        elif version is None:
            missing[min(extras - _DEVELOPMENT)].append(requirement.name)  # any of the extras, always the same
        else:
            installed.append(f"{requirement.name} {version}")
    lines = textwrap.wrap(", ".join(dict.fromkeys(installed)), 100)  # once, although several extras require it
    for extra, packages in missing.items():
        lines.append(f"not installed: {', '.join(packages)} (pip install 'torchtune[{extra}]')")
    return lines
