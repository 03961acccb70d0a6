"""What a simulated run says of a real one."""

from collections import defaultdict

from torchtune.training.simulate import _roofline
from torchtune.training.simulate._devices import Accelerator
from torchtune.training.simulate._ledger import COMPONENTS, Peak
from torchtune.training.simulate._roofline import StepTime, step_time
from torchtune.training.simulate._simulate import Simulation

GIB = 2**30
ASSUMED_ROWS = 50_000


def summary(simulation: Simulation, device: Accelerator) -> str:
    """Describe a simulation: memory by phase and component, what fills it, FLOPs, traffic, time and cost."""
    peaks = simulation.observer.ledger.peaks()
    highest = max(peaks.values(), key=lambda peak: peak.total)
    time = step_time(simulation.observer, device)
    rows = [
        ("simulated", f"2 steps of the recipe, {simulation.dims}, each {device.name} with {device.memory} GiB"),
        ("parameters", f"{simulation.parameters[0]:,}, of which {simulation.parameters[1]:,} are trained"),
        ("micro-batch", _batch(simulation)),
        *_memory(peaks),
        *_filled(simulation, peaks, highest, device),
        *_work(simulation),
        *_time(simulation, time, device),
        *_assumed(simulation, device),
    ]
    return "\n".join(f"{name:<14}{text}".rstrip() for name, text in rows)


def peak_bytes(simulation: Simulation) -> int:
    """The most memory that a device needs."""
    return max(peak.total for peak in simulation.observer.ledger.peaks().values())


def tokens_per_step(simulation: Simulation) -> int:
    """Tokens of a step, over all ranks."""
    cfg = simulation.settings
    rows = cfg.batch_size * cfg.gradient_accumulation_steps * simulation.dims.data_size
    return rows * simulation.length


def _batch(simulation: Simulation) -> str:
    cfg, length = simulation.settings, simulation.length
    micro = f"{cfg.batch_size} x {length:,} = {cfg.batch_size * length:,} tokens a rank"
    return f"{micro}, {tokens_per_step(simulation):,} a step of all ranks"


def _memory(peaks: dict[str, Peak]) -> list[tuple[str, str]]:
    head = "".join(f"{phase:>11}" for phase in peaks)
    lines = [("memory", f"{head}   GiB of each device at the peak of each phase")]
    for component in COMPONENTS:
        sizes = "".join(f"{peak.components[component] / GIB:>11.2f}" for peak in peaks.values())
        lines.append((f"  {component}", sizes))
    return [*lines, ("  total", "".join(f"{peak.total / GIB:>11.2f}" for peak in peaks.values()))]


def _filled(
    simulation: Simulation, peaks: dict[str, Peak], highest: Peak, device: Accelerator
) -> list[tuple[str, str]]:
    phase = next(name for name, peak in peaks.items() if peak is highest)
    over = simulation.observer.ledger.first_over(int(device.memory * GIB))
    fits = "it fits" if over is None else "IT DOES NOT FIT"
    share = highest.total / (device.memory * GIB)
    lines = [("peak", f"{highest.total / GIB:.2f} GiB in {phase}, {share:.0%} of {device.memory} GiB: {fits}")]
    if over is None:
        lines.append(("  reached by", f"{highest.block.what} in {highest.block.where}"))
    else:
        lines.append(("  tipped by", f"{over[1].block.what} in {over[1].block.where}, {over[0]}"))
    for size, count, what, where in (highest if over is None else over[1]).largest:
        lines.append(("  held then", f"{size / GIB:6.2f} GiB: {count} x {what}, {where}"))
    ledger = simulation.observer.ledger
    host = sum(ledger.held(component, on_host=True) for component in COMPONENTS)
    return [*lines, ("host memory", f"{host / GIB:.2f} GiB a rank")] if host else lines


def _work(simulation: Simulation) -> list[tuple[str, str]]:
    flops: dict[str, int] = defaultdict(int)
    traffic: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    observer = simulation.observer
    for (step, phase), work in observer.work.items():
        if step == observer.step:
            flops[phase] += sum(work.flops.values())
            for kinds in (work.traffic, work.waiting):
                for (kind, _), (calls, size) in kinds.items():
                    traffic[kind][0] += calls
                    traffic[kind][1] += size
    parts = ", ".join(f"{count / 1e12:,.1f} {phase}" for phase, count in flops.items() if count)
    sent = ", ".join(f"{kind} {calls} x, {_size(size)}" for kind, (calls, size) in traffic.items())
    lines = [("FLOPs", f"{sum(flops.values()) / 1e12:,.1f} T a step and device ({parts})")]
    return [*lines, ("collectives", f"{sent} a step")] if sent else lines


def _time(simulation: Simulation, time: StepTime, device: Accelerator) -> list[tuple[str, str]]:
    tokens = tokens_per_step(simulation)
    processes = simulation.dims.world_size
    flops = sum(
        sum(work.flops.values())
        for (step, _), work in simulation.observer.work.items()
        if step == simulation.observer.step
    )
    text = f"{time.total:.2f} s ({time.computing:.2f} computing, {time.launching:.2f} host, "
    text += f"{time.overlapped:.2f} FSDP's collectives beside it, {time.waiting:.2f} others), bound by {time.bound}"
    speed = f"{tokens / time.total / processes:,.0f} tokens/s a device, {flops / time.total / device.bf16:.0%} of peak"
    steps, remark = _steps(simulation)
    hours = steps * time.total / 3600
    cost = f"{hours * processes:,.1f} GPU-hours, {hours:,.1f} h for {steps:,} steps ({remark})"
    return [("step time", text), ("speed", speed), ("cost", cost)]


def _steps(simulation: Simulation) -> tuple[int, str]:
    """(steps of the run, how that is known)."""
    cfg = simulation.settings
    if cfg.max_steps_per_epoch is not None:
        return cfg.epochs * cfg.max_steps_per_epoch, f"epochs={cfg.epochs} x max_steps_per_epoch"
    a_step = cfg.batch_size * cfg.gradient_accumulation_steps * simulation.dims.data_size
    remark = f"epochs={cfg.epochs} of {ASSUMED_ROWS:,} rows, assumed: set max_steps_per_epoch to say how many steps"
    return cfg.epochs * -(-ASSUMED_ROWS // a_step), remark


def _assumed(simulation: Simulation, device: Accelerator) -> list[tuple[str, str]]:
    lines = []
    if simulation.length_is_assumed:
        lines.append(f"rows of {simulation.length:,} tokens: set tokenizer.max_seq_len to say otherwise")
    lines += [
        "every row is full and every token has a label; experts get equal shares; nothing is compiled",
        f"kernels reach {_roofline.ARITHMETIC:.0%} of {device.bf16 / 1e12:,.0f} TFLOP/s (bf16) or "
        f"{_roofline.MEMORY:.0%} of {device.bandwidth:,.0f} GB/s; an operator takes the host "
        f"{_roofline.LAUNCH * 1e6:.0f} µs",
    ]
    if step_time(simulation.observer, device).hosted:
        lines.append(f"copies to host memory reach {_roofline.LINKS:.0%} of {_roofline.HOST_LINK / 1e9:.0f} GB/s")
    if simulation.dims.world_size > 1:
        lines.append(
            f"messages reach {_roofline.LINKS:.0%} of {device.link:,.0f} GB/s within a machine of "
            f"{device.per_machine}, {device.network:g} GB/s a device between machines"
        )
    lines.append("not counted: the slack of the allocator, workspaces of kernels and NCCL, 1 to 2 GiB together")
    return [("assumed" if index == 0 else "", line) for index, line in enumerate(lines)]


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size > GIB / 100 else f"{size / 2**20:,.2f} MiB"
