"""Profile a window of steps with ``torch.profiler``."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from torchtune.utils import ObserverGuard, UserError, get_logger, get_world_size_and_rank, verbose_profiling

PROFILER_KEY = "profiler"
DEFAULT_PROFILER_ACTIVITIES = {ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU}
DEFAULT_SCHEDULE: dict[str, int] = {"wait_steps": 5, "warmup_steps": 5, "active_steps": 2, "num_cycles": 1}
DEFAULT_TRACE_OPTS: dict[str, bool] = {
    "profile_memory": False,
    "with_stack": False,
    "record_shapes": True,
    "with_flops": False,
}
DEFAULT_PROFILE_DIR: str = "profiler_output"


def trace_handler(
    prof: torch.profiler.profile, output_dir: str, metric: str = "self_cuda_time_total", row_limit: int = 25
) -> None:
    """Write the trace of one window (for chrome://tracing or Perfetto) and a table of the most expensive operations.

    Args:
        prof: a profiler at the end of its window.
        output_dir: output folder for ``iteration_{step}/rank{r}_trace.json`` and ``rank{r}_key_averages.txt``.
        metric: sort key of the table.
        row_limit: number of rows of the table.
    """
    rank = get_world_size_and_rank()[1]
    folder = Path(output_dir) / f"iteration_{prof.step_num}"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    prof.export_chrome_trace(str(folder / f"rank{rank}_trace.json"))
    if prof.profile_memory and torch.cuda.is_available():
        prof.export_memory_timeline(str(folder / f"rank{rank}_memory-timeline.html"))
    if prof.with_stack:
        prof.export_stacks(str(folder / f"rank{rank}_stacks.txt"), metric=metric)
    table = prof.key_averages().table(sort_by=metric, row_limit=row_limit)
    (folder / f"rank{rank}_key_averages.txt").write_text(table + "\n", encoding="utf-8")
    if rank == 0:
        get_logger().info(f"Profile of {folder.name} is in {folder} ({time.perf_counter() - start:.1f} s).")


class DummyProfiler:
    """Profiler with the interface of ``torch.profiler.profile`` that does nothing.

    Example:
        >>> with torchtune.supervision.DummyProfiler() as profiler:
        ...     profiler.step()
    """

    def __enter__(self) -> "DummyProfiler":
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Do nothing."""


def setup_torch_profiler(
    enabled: bool = False,
    cpu: bool = True,
    cuda: bool = True,
    xpu: bool = True,
    hpu: bool = False,
    profile_memory: bool = DEFAULT_TRACE_OPTS["profile_memory"],
    with_stack: bool = DEFAULT_TRACE_OPTS["with_stack"],
    record_shapes: bool = DEFAULT_TRACE_OPTS["record_shapes"],
    with_flops: bool = DEFAULT_TRACE_OPTS["with_flops"],
    wait_steps: int | None = None,
    warmup_steps: int | None = None,
    active_steps: int | None = None,
    num_cycles: int | None = None,
    output_dir: str | None = None,
) -> tuple[torch.profiler.profile | DummyProfiler, dict[str, Any]]:
    """Build a profiler whose windows consist of idle steps, warmup steps (discarded) and recorded steps.

    Args:
        enabled: if False, return a ``DummyProfiler``.
        cpu, cuda, xpu, hpu: activities to record; activities that the machine lacks are skipped.
        profile_memory: record allocations.
        with_stack: record source lines.
        record_shapes: record the shapes of operands.
        with_flops: estimate the FLOPs of matrix products.
        wait_steps, warmup_steps, active_steps, num_cycles: lengths of the window's phases in steps, and number of
            windows (0: until the end of the run). If one is None, all four take their defaults (5, 5, 2, 1).
        output_dir: folder of the traces; ``profiler_output`` by default.

    Returns:
        The profiler and the settings in use.

    Raises:
        UserError: there is nothing to record, or a length is invalid.
    """
    if not enabled:
        return DummyProfiler(), {"enabled": False}
    requested = {"CPU": cpu, "CUDA": cuda, "XPU": xpu, "HPU": hpu}
    supported = torch.profiler.supported_activities()
    activities = []
    for name, is_requested in requested.items():
        activity = getattr(ProfilerActivity, name, None)  # not every release of torch has all of them
        if is_requested and activity in supported:
            activities.append(activity)
    if not activities:
        raise UserError("profiler: nothing to record on this machine: set one of cpu, cuda, xpu or hpu to True.")

    schedule = {
        "wait_steps": wait_steps,
        "warmup_steps": warmup_steps,
        "active_steps": active_steps,
        "num_cycles": num_cycles,
    }
    if any(value is None for value in schedule.values()):  # a mixture would be a window that nobody has asked for
        schedule = dict(DEFAULT_SCHEDULE)
        get_logger().info(f"profiler: the windows are not all given, using {schedule}.")
    for name, length in schedule.items():
        least = 1 if name == "active_steps" else 0  # a window without recorded steps has no trace
        if length < least:
            raise UserError(f"profiler: {name}={length} must be at least {least}.")

    options = {
        "profile_memory": profile_memory,
        "with_stack": with_stack,
        "record_shapes": record_shapes,
        "with_flops": with_flops,
    }
    output_dir = str(output_dir or DEFAULT_PROFILE_DIR)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    on_cuda = ProfilerActivity.CUDA in activities
    sort_key = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
    guard = ObserverGuard("profiler")

    def on_trace_ready(profiler: torch.profiler.profile) -> None:
        # Guarded here, because torch crashes if a profile is stopped whose handler has raised.
        guard.call(lambda: trace_handler(profiler, output_dir=output_dir, metric=sort_key))

    experimental_config = None
    if with_stack:  # stacks are only exported with it
        experimental_config = verbose_profiling()
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=schedule["wait_steps"],
            warmup=schedule["warmup_steps"],
            active=schedule["active_steps"],
            repeat=schedule["num_cycles"],
        ),
        experimental_config=experimental_config,
        on_trace_ready=on_trace_ready,
        **options,
    )
    recorded = {name.lower(): getattr(ProfilerActivity, name, None) in activities for name in requested}
    return profiler, {"enabled": True, "output_dir": output_dir, **recorded, **schedule, **options}


class GuardedProfiler:
    """Passes all calls to a profiler, whose errors end no run: the first one ends the profile, with a warning.

    Args:
        profiler: the profiler; a started one is not accepted.

    Example:
        >>> with torchtune.supervision.GuardedProfiler(torchtune.supervision.DummyProfiler()) as profiler:
        ...     profiler.step()
    """

    def __init__(self, profiler: torch.profiler.profile) -> None:
        self._profiler = profiler
        self._guard = ObserverGuard("profiler")
        self._is_running = False

    def __enter__(self) -> "GuardedProfiler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin the first window."""
        self._is_running = True
        self._call(self._profiler.start)

    def stop(self) -> None:
        """Write the trace of a window that is being recorded."""
        self._call(self._profiler.stop)
        self._is_running = False

    def step(self) -> None:
        """Count a step."""
        self._call(self._profiler.step)

    def _call(self, function: Callable[[], None]) -> None:
        """Call a method of the profiler, unless it has failed before."""
        if not self._is_running:
            return
        self._guard.call(function)
        if self._guard.has_failed:  # its state is unknown, and torch may crash if it is stopped
            self._is_running = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profiler, name)


def profiler_from_config(cfg: Any | None) -> GuardedProfiler | DummyProfiler:
    """Build the profiler of a recipe's ``profiler`` section, or a ``DummyProfiler`` if ``cfg`` is None.

    Raises:
        UserError: ``_component_`` is not ``setup_torch_profiler``, or a setting is wrong.
    """
    if cfg is None:
        return DummyProfiler()
    from torchtune import config

    component = cfg.get("_component_", "torchtune.training.setup_torch_profiler")
    if component != "torchtune.training.setup_torch_profiler":
        raise UserError(f"profiler: {component} is not torchtune.training.setup_torch_profiler, the only one there is.")
    profiler, used = config.instantiate({**cfg, "_component_": component})
    if not used["enabled"]:
        return profiler
    get_logger().info(f"Profiling: {used}")
    return GuardedProfiler(profiler)
