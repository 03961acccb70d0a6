"""Report of a simulated run."""

from collections import Counter

from torchtune.estimate import _roofline
from torchtune.estimate._devices import Accelerator
from torchtune.estimate._extrapolate import Estimate
from torchtune.estimate._ledger import COMPONENTS, Peak
from torchtune.estimate._roofline import step_time
from torchtune.training.memory import resident_bytes
from torchtune.utils import parse_device

GIB = 2**30
ASSUMED_ROWS = 50_000
Rows = list[tuple[str, str]]
# Kernels of oneDNN, and memory between tensors that the C library cannot return: measured with LoRA of a model of 135M
# parameters, so that it is a rule of thumb for others.
_HOST_OVERHEAD = 0.3 * GIB


def summary(estimate: Estimate, device: Accelerator) -> str:
    """Describe a run: memory by phase and component, its largest blocks, FLOPs, communication, time and cost."""
    return _lines(
        [
            ("simulated", f"a step of the recipe, {estimate.dims}, each {device.name} with {device.memory} GiB"),
            ("", _layers(estimate)),
            ("parameters", f"{estimate.parameters[0]:,}, of which {estimate.parameters[1]:,} are trained"),
            ("micro-batch", _batch(estimate)),
            *_memory(estimate),
            *_filled(estimate, device),
            *_work(estimate),
            *_time(estimate, device),
            *_assumed(estimate, device),
        ]
    )


def memory(estimate: Estimate) -> str:
    """Return a table of the memory of each process, by phase and component."""
    phase, peak = max(estimate.peaks.items(), key=lambda item: item[1].total)
    rows = [*_memory(estimate), ("peak", f"{peak.total / GIB:.2f} GiB in {phase}"), *_host(estimate)]
    return _lines([*rows, *_resident(estimate, peak.total)])


def _lines(rows: Rows) -> str:
    return "\n".join(f"{name:<14}{text}".rstrip() for name, text in rows)


def _layers(estimate: Estimate) -> str:
    if estimate.simulated == (estimate.layers,):
        return f"all {estimate.layers} layers"
    *most, last = map(str, estimate.simulated)
    return f"with {', '.join(most)} and {last} of {estimate.layers} layers, extrapolated to all"


def _batch(estimate: Estimate) -> str:
    cfg, length = estimate.settings, estimate.length
    micro = f"{cfg.batch_size} x {length:,} = {cfg.batch_size * length:,} tokens per rank"
    return f"{micro}, {estimate.tokens:,} per step over all ranks"


def _memory(estimate: Estimate) -> Rows:
    peaks = estimate.peaks
    head = "".join(f"{phase:>11}" for phase in peaks)
    lines = [("memory", f"{head}   GiB of each device at the peak of each phase")]
    for component in COMPONENTS:
        sizes = "".join(f"{peak.components[component] / GIB:>11.2f}" for peak in peaks.values())
        lines.append((f"  {component}", sizes))
    return [*lines, ("  total", "".join(f"{peak.total / GIB:>11.2f}" for peak in peaks.values()))]


def _filled(estimate: Estimate, device: Accelerator) -> Rows:
    phase, highest = max(estimate.peaks.items(), key=lambda item: item[1].total)
    moments = estimate.moments.items()
    over = next(((name, peak) for (name, _), peak in moments if peak.total > device.memory * GIB), None)
    fits = "it fits" if over is None else "IT DOES NOT FIT"
    share = highest.total / (device.memory * GIB)
    lines = [("peak", f"{highest.total / GIB:.2f} GiB in {phase}, {share:.0%} of {device.memory} GiB: {fits}")]
    if over is None:
        lines.append(("  reached by", highest.reached_by))
    else:
        lines.append(("  exceeded by", f"{over[1].reached_by}, {over[0]}"))
    return [*lines, *_largest(highest if over is None else over[1]), *_host(estimate)]


def _largest(peak: Peak) -> Rows:
    largest = sorted(((size, peak.counts[key], *key) for key, size in peak.held.items()), reverse=True)
    return [
        ("  allocated", f"{size / GIB:6.2f} GiB: {count:.0f} x {operator}, {where} ({component})")
        for size, count, component, operator, where in largest[:5]
    ]


def _host(estimate: Estimate) -> Rows:
    return [("host memory", f"{estimate.host / GIB:.2f} GiB per rank")] if estimate.host else []


def _resident(estimate: Estimate, tensors: float) -> Rows:
    """Return the memory of the whole process on a CPU, where it holds the tensors; nothing for other devices."""
    if parse_device(estimate.settings.device).type != "cpu":
        return []
    # This process has loaded the libraries that the run loads.
    libraries = resident_bytes()
    total = libraries + tensors + _HOST_OVERHEAD
    text = f"about {total / GIB:.2f} GiB: the tensors, {libraries / GIB:.2f} GiB of libraries, and "
    return [("process", f"{text}{_HOST_OVERHEAD / GIB:.1f} GiB of kernels and of memory between tensors")]


def _flops(estimate: Estimate) -> dict[str, float]:
    return {phase: sum(work.flops.values()) for phase, work in estimate.work.items()}


def _work(estimate: Estimate) -> Rows:
    flops, calls, sizes = _flops(estimate), Counter(), Counter()
    for work in estimate.work.values():
        for (kind, ranks), number in (work.collectives + work.waiting).items():
            calls[kind] += number
            sizes[kind] += work.sent[kind, ranks] + work.awaited[kind, ranks]
    parts = ", ".join(f"{count / 1e12:,.1f} {phase}" for phase, count in flops.items() if count)
    sent = ", ".join(f"{kind} {number:.0f} x, {_size(sizes[kind])}" for kind, number in calls.items())
    lines = [("FLOPs", f"{sum(flops.values()) / 1e12:,.1f} T per step and device ({parts})")]
    return [*lines, ("collectives", f"{sent} per step")] if sent else lines


def _time(estimate: Estimate, device: Accelerator) -> Rows:
    time, processes = step_time(estimate.work.values(), device), estimate.dims.world_size
    text = f"{time.total:.2f} s ({time.computing:.2f} computing, {time.launching:.2f} host, "
    text += f"{time.overlapped:.2f} FSDP's collectives overlapped, {time.waiting:.2f} others), bound by {time.bound}"
    share = sum(_flops(estimate).values()) / time.total / device.bf16
    speed = f"{estimate.tokens / time.total / processes:,.0f} tokens/s per device, {share:.0%} of peak"
    steps, remark = _steps(estimate)
    hours = steps * time.total / 3600
    cost = f"{hours * processes:,.1f} GPU-hours, {hours:,.1f} h for {steps:,} steps ({remark})"
    return [("step time", text), ("speed", speed), ("cost", cost)]


def _steps(estimate: Estimate) -> tuple[int, str]:
    """Return (steps of the run, the reason for that number)."""
    cfg = estimate.settings
    if cfg.max_steps_per_epoch is not None:
        return cfg.epochs * cfg.max_steps_per_epoch, f"epochs={cfg.epochs} x max_steps_per_epoch"
    a_step = cfg.batch_size * cfg.gradient_accumulation_steps * estimate.dims.data_size
    remark = f"epochs={cfg.epochs} of {ASSUMED_ROWS:,} rows, assumed: set max_steps_per_epoch for another number"
    return cfg.epochs * -(-ASSUMED_ROWS // a_step), remark


def _assumed(estimate: Estimate, device: Accelerator) -> Rows:
    lines = []
    if estimate.length_is_assumed:
        lines.append(f"rows of {estimate.length:,} tokens: set tokenizer.max_seq_len for another length")
    lines += [
        "all rows are full, all tokens have labels, experts are balanced, nothing is compiled",
        f"kernels reach {_roofline.ARITHMETIC:.0%} of {device.bf16 / 1e12:,.0f} TFLOP/s (bf16) or "
        f"{_roofline.MEMORY:.0%} of {device.bandwidth:,.0f} GB/s; the host launches an operator in "
        f"{_roofline.LAUNCH * 1e6:.0f} µs",
    ]
    if step_time(estimate.work.values(), device).hosted:
        lines.append(f"copies to host memory reach {_roofline.LINKS:.0%} of {_roofline.HOST_LINK / 1e9:.0f} GB/s")
    if estimate.settings.fsdp_cpu_offload:
        lines.append("the optimizer takes as long in host memory as on the device")
    if estimate.dims.world_size > 1:
        lines.append(
            f"messages reach {_roofline.LINKS:.0%} of {device.link:,.0f} GB/s within a machine of "
            f"{device.per_machine}, {device.network:g} GB/s per device between machines"
        )
    lines.append("not counted: fragmentation, workspaces of kernels and NCCL, together 1 to 2 GiB")
    return [("assumed" if index == 0 else "", line) for index, line in enumerate(lines)]


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size > GIB / 100 else f"{size / 2**20:,.2f} MiB"
