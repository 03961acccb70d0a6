"""Report of a simulated run."""

import math
from collections import Counter

from torchtune.estimate import _roofline
from torchtune.estimate._extrapolate import Estimate
from torchtune.estimate._ledger import COMPONENTS, Peak
from torchtune.estimate._roofline import Accelerator, step_time
from torchtune.supervision import StepPlan
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
    """Return rows as lines; an empty name continues the row before."""
    return "\n".join(f"{name:<14}{text}".rstrip() for name, text in rows)


def _layers(estimate: Estimate) -> str:
    """Describe how many layers were simulated."""
    if estimate.simulated == (estimate.layers,):
        return f"all {estimate.layers} layers"
    *first, last = [str(layers) for layers in estimate.simulated]
    return f"with {', '.join(first)} and {last} of {estimate.layers} layers, extrapolated to all"


def _batch(estimate: Estimate) -> str:
    """Describe the tokens of a micro-batch and of a step."""
    size = StepPlan.of(estimate.settings).batch_size
    length = estimate.length
    micro = f"{size} x {length:,} = {size * length:,} tokens per rank"
    return f"{micro}, {estimate.tokens:,} per step over all ranks"


def _memory(estimate: Estimate) -> Rows:
    """Return a table of the memory of a device, with a column for each phase and a row for each component."""
    peaks = estimate.peaks
    head = "".join(f"{phase:>11}" for phase in peaks)
    rows = [("memory", f"{head}   GiB of each device at the peak of each phase")]
    for component in COMPONENTS:
        sizes = "".join(f"{peak.components[component] / GIB:>11.2f}" for peak in peaks.values())
        rows.append((f"  {component}", sizes))
    totals = "".join(f"{peak.total / GIB:>11.2f}" for peak in peaks.values())
    rows.append(("  total", totals))
    return rows


def _filled(estimate: Estimate, device: Accelerator) -> Rows:
    """Return the highest peak, whether it fits, and the largest blocks: of the first moment that does not fit."""
    capacity = device.memory * GIB
    phase, highest = max(estimate.peaks.items(), key=lambda item: item[1].total)
    exceeding = None  # the first moment that does not fit: the run would end here, before its highest peak
    for (moment_phase, _), peak in estimate.moments.items():
        if peak.total > capacity:
            exceeding = (moment_phase, peak)
            break
    share = f"{highest.total / GIB:.2f} GiB in {phase}, {highest.total / capacity:.0%} of {device.memory} GiB"
    if exceeding is None:
        rows = [("peak", f"{share}: it fits"), ("  reached by", highest.reached_by), *_largest(highest)]
    else:
        moment_phase, peak = exceeding
        rows = [
            ("peak", f"{share}: IT DOES NOT FIT"),
            ("  exceeded by", f"{peak.reached_by}, {moment_phase}"),
            *_largest(peak),
        ]
    return [*rows, *_host(estimate)]


def _largest(peak: Peak) -> Rows:
    """Return the five places that hold most memory."""
    blocks = [(size, peak.counts[key], *key) for key, size in peak.held.items()]
    rows = []
    for size, count, component, operator, location in sorted(blocks, reverse=True)[:5]:
        rows.append(("  allocated", f"{size / GIB:6.2f} GiB: {count:.0f} x {operator}, {location} ({component})"))
    return rows


def _host(estimate: Estimate) -> Rows:
    """Return the memory of the host that offloading needs, if there is any."""
    if not estimate.host:
        return []
    return [("host memory", f"{estimate.host / GIB:.2f} GiB per rank")]


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
    """Return the FLOPs of a step and device, by phase."""
    return {phase: sum(work.flops.values()) for phase, work in estimate.work.items()}


def _work(estimate: Estimate) -> Rows:
    """Return the FLOPs and the communication of a step."""
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for work in estimate.work.values():
        # Both those that overlap with computation and those that others wait for.
        collectives = work.collectives + work.waiting
        for (kind, ranks), number in collectives.items():
            calls[kind] += number
            sizes[kind] += work.sent[kind, ranks] + work.awaited[kind, ranks]
    flops = _flops(estimate)
    phases = ", ".join(f"{count / 1e12:,.1f} {phase}" for phase, count in flops.items() if count)
    rows = [("FLOPs", f"{sum(flops.values()) / 1e12:,.1f} T per step and device ({phases})")]
    if calls:
        sent = ", ".join(f"{kind} {number:.0f} x, {_size(sizes[kind])}" for kind, number in calls.items())
        rows.append(("collectives", f"{sent} per step"))
    return rows


def _time(estimate: Estimate, device: Accelerator) -> Rows:
    """Return the time of a step, the speed, and the cost of the run."""
    time = step_time(estimate.work.values(), device)
    processes = estimate.dims.world_size
    step = (
        f"{time.total:.2f} s ({time.computing:.2f} computing, {time.launching:.2f} host, {time.overlapped:.2f} FSDP's "
        f"collectives overlapped, {time.waiting:.2f} others), bound by {time.bound}"
    )
    share_of_peak = sum(_flops(estimate).values()) / time.total / device.bf16  # the MFU
    speed = f"{estimate.tokens / time.total / processes:,.0f} tokens/s per device, {share_of_peak:.0%} of peak"
    steps, reason = _steps(estimate)
    hours = steps * time.total / 3600
    cost = f"{hours * processes:,.1f} GPU-hours, {hours:,.1f} h for {steps:,} steps ({reason})"
    return [("step time", step), ("speed", speed), ("cost", cost)]


def _steps(estimate: Estimate) -> tuple[int, str]:
    """Return (steps of the run, the reason for that number)."""
    plan = StepPlan.of(estimate.settings)
    if plan.max_steps is not None:
        return plan.max_steps, "max_steps"
    if plan.max_steps_per_epoch is not None:
        return plan.epochs * plan.max_steps_per_epoch, f"epochs={plan.epochs} x max_steps_per_epoch"
    rows_per_step = plan.rows_per_step(estimate.dims.data_size)
    reason = f"epochs={plan.epochs} of {ASSUMED_ROWS:,} rows, assumed: set max_steps_per_epoch for another number"
    return plan.epochs * math.ceil(ASSUMED_ROWS / rows_per_step), reason


def _assumed(estimate: Estimate, device: Accelerator) -> Rows:
    """Return what the numbers assume."""
    lines = []
    if estimate.length_is_assumed:
        lines.append(f"rows of {estimate.length:,} tokens: set tokenizer.max_seq_len for another length")
    lines.append("all rows are full, all tokens have labels, experts are balanced, nothing is compiled")
    lines.append(
        f"kernels reach {_roofline.ARITHMETIC:.0%} of {device.bf16 / 1e12:,.0f} TFLOP/s (bf16) or "
        f"{_roofline.MEMORY:.0%} of {device.bandwidth:,.0f} GB/s; the host launches an operator in "
        f"{_roofline.LAUNCH * 1e6:.0f} µs"
    )
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
    return [("assumed", lines[0]), *(("", line) for line in lines[1:])]


def _size(size: float) -> str:
    """Return bytes in GiB, or in MiB if they are few."""
    if size > GIB / 100:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:,.2f} MiB"
