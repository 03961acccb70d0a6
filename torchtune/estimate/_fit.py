"""Search for the fastest settings that fit in memory, by combining levers that trade time for memory.

The search first simulates the given settings, and each change of a single lever. Combinations of levers are ordered by
the product of their slowdowns; combinations that cannot fit are excluded by the product of their savings per component
of memory. The remaining combinations are simulated, fastest first, until the next combination would be slower than the
fastest one that fits.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtune.estimate._devices import Accelerator
from torchtune.estimate._extrapolate import Estimate
from torchtune.estimate._ledger import COMPONENTS
from torchtune.estimate._plan import arrange, build_on_meta
from torchtune.estimate._roofline import step_time
from torchtune.modules.moe import MoE
from torchtune.training import SettingsView
from torchtune.utils import UserError

# Maximum number of combinations to simulate, in each of two rounds.
MOST = 8
# Tolerated error of a product of slowdowns, as a factor.
CLOSE = 1.1
# Tolerated error of a product of savings, as a factor.
MARGIN = 1.25

# Minimum factor by which an override must reduce memory.
SAVES_NOTHING = 1.02

# (overrides, rough slowdown of a step); the slowdown orders combinations that are not simulated yet.
Option = tuple[tuple[str, ...], float]
# (overrides, expected bytes).
Saved = tuple[set[str], float]


@dataclass(frozen=True)
class Candidate:
    """Overrides, with their memory and time.

    Attributes:
        overrides: settings as on the command line.
        peak: peak memory of a device in bytes.
        seconds: seconds per million tokens.
        memory: peak bytes by (phase, component).
    """

    overrides: tuple[str, ...]
    peak: float
    seconds: float
    memory: Mapping[tuple[str, str], float] = field(default_factory=dict)


def _levers(cfg: SettingsView, processes: int, *, last: bool, experts: bool) -> list[list[Option]]:
    """Return the options of every lever: overrides, and the slowdown of a step relative to the initial settings."""
    rows = cfg.batch_size * cfg.gradient_accumulation_steps
    sizes = [size for size in range(rows, 0, -1) if rows % size == 0 and (size & (size - 1) == 0 or size == rows)]
    batches = [
        ((f"batch_size={size}", f"gradient_accumulation_steps={rows // size}"), 1.05 ** math.log2(rows / size))
        for size in sizes
    ]
    levers = {
        "gradient_accumulation_steps": batches,
        "enable_activation_checkpointing": _recomputing(cfg),
        "enable_activation_offloading": _switch("enable_activation_offloading", 1.25),
        "optimizer_in_bwd": _switch("optimizer_in_bwd", 1.02, "clip_grad_norm=null"),
        "optimizer": _optimizers(cfg),
        "model": _bases(cfg),
    }
    if processes > 1:
        levers["data_parallel_replicate_dim"] = _shards(cfg)
    if processes > 1 and experts:
        levers["expert_parallel_dim"] = _splits(cfg, processes, "expert_parallel_dim", 1.02)
    if processes > 1 and last:
        alone = "data_parallel_shard_dim=-1"
        levers["tensor_parallel_dim"] = _splits(cfg, processes, "tensor_parallel_dim", 1.2, alone)
        levers["context_parallel_dim"] = _splits(cfg, processes, "context_parallel_dim", 1.15, alone)
        levers["fsdp_cpu_offload"] = _switch("fsdp_cpu_offload", 3.0)
    found = []
    for options in (options for key, options in levers.items() if cfg.can_set(key)):
        changes = [(tuple(text for text in texts if not _is_given(cfg, text)), slower) for texts, slower in options]
        given = next((slower for changed, slower in changes if not changed), 1.0)
        found.append([(changed, slower / given) for changed, slower in changes])
    return found


def _switch(key: str, slower: float, *more: str) -> list[Option]:
    return [((f"{key}=False",), 1.0), ((f"{key}=True", *more), slower)]


def _recomputing(cfg: SettingsView) -> list[Option]:
    """Return the options of activation checkpointing: none, element-wise operations, every second layer, all layers."""
    selects = cfg.can_set("ac_mode") and cfg.can_set("ac_option")
    reset = ("ac_mode=null", "ac_option=null") if selects else ()
    selective = [
        (("enable_activation_checkpointing=False", "ac_mode=selective", f"ac_option={option}"), slower)
        for option, slower in ((("op", 1.1), ("2", 1.17)) if selects else ())
    ]
    nothing = (("enable_activation_checkpointing=False", *reset), 1.0)
    return [nothing, *selective, (("enable_activation_checkpointing=True", *reset), 1.33)]


def _splits(cfg: SettingsView, processes: int, key: str, slower: float, *more: str) -> list[Option]:
    """Return options for sharding over more ranks, in powers of two within a machine."""
    given = getattr(cfg, key)
    sizes = [size for size in (given, 2 * given, 4 * given, 8 * given) if size <= min(8, processes)]
    return [((f"{key}={size}", *more), slower ** math.log2(size / given)) for size in sizes if processes % size == 0]


def _shards(cfg: SettingsView) -> list[Option]:
    given = [((f"data_parallel_replicate_dim={cfg.data_parallel_replicate_dim}",), 1.0)]
    fewer = [(("data_parallel_replicate_dim=1", "data_parallel_shard_dim=-1"), 1.1)]
    return given + (fewer if cfg.data_parallel_replicate_dim > 1 else [])


def _optimizers(cfg: SettingsView) -> list[Option]:
    """Return the given optimizer, and its variant with 8-bit states."""
    given = "" if cfg.optimizer is None else str(cfg.optimizer.get("_component_"))
    few_bits = [(("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused"), 1.05)]
    return [((f"optimizer._component_={given}",), 1.0)] + (few_bits if given == "torch.optim.AdamW" else [])


def _bases(cfg: SettingsView) -> list[Option]:
    """Return the given frozen weights, and the variant with 4-bit frozen weights."""
    given = "" if cfg.model is None else str(cfg.model.get("_component_"))
    package, _, name = given.rpartition(".")
    quantized = [((f"model._component_={package}.q{name}",), 1.35)]
    return [((f"model._component_={given}",), 1.0)] + (quantized if name.startswith("lora_") else [])


# Levers that are only tried if nothing fits without them.
LAST = ("tensor_parallel_dim", "context_parallel_dim", "fsdp_cpu_offload")


def candidates(
    settings: Any,
    processes: int,
    *,
    last: bool = False,
    experts: bool = False,
    costs: Mapping[tuple[str, ...], float] | None = None,
) -> dict[tuple[str, ...], float]:
    """Return the overrides of every combination of levers, with the estimated slowdown of a step, ascending.

    Args:
        settings: initial settings; overrides that they already contain are omitted.
        processes: number of processes.
        last: return combinations with a lever of ``LAST`` instead of combinations without.
        experts: whether the model has experts, which expert parallelism can distribute.
        costs: simulated slowdowns of single changes; others use a rough factor.
    """
    levers = [
        [(changed, (costs or {}).get(changed, factor)) for changed, factor in options]
        for options in _levers(SettingsView.of(settings), processes, last=last, experts=experts)
    ]
    found: dict[tuple[str, ...], float] = {}
    for chosen in itertools.product(*levers):
        changed = tuple(dict.fromkeys(text for texts, _ in chosen for text in texts))
        if last is any(text.startswith(LAST) for text in changed):
            slower = math.prod(factor for _, factor in chosen)
            found[changed] = min(slower, found.get(changed, math.inf))
    return dict(sorted(found.items(), key=lambda item: (item[1], len(item[0]))))


def _is_given(cfg: SettingsView, text: str) -> bool:
    """Return whether the settings already contain an override."""
    key, _, value = text.partition("=")
    section, _, leaf = key.lstrip("~").partition(".")
    given = getattr(cfg, section, None)
    if leaf:
        given = None if given is None else given.get(leaf)
    return given is None if key.startswith("~") else str(given) == value.replace("null", "None")


@dataclass
class Search:
    """Search for settings that fit, independent of how candidates are simulated.

    Attributes:
        settings: initial settings.
        processes: number of processes.
        limit: memory of a device in bytes.
        check: raises if overrides exclude each other.
        measure: simulates overrides; raises if the run rejects them.
        report: called with a line of text for every candidate.
        experts: whether the model has experts.
        known: simulated candidates by overrides; None if rejected.
    """

    settings: Any
    processes: int
    limit: float
    check: Callable[[tuple[str, ...]], Any]
    measure: Callable[[tuple[str, ...]], Candidate]
    report: Callable[[str], None]
    experts: bool = False
    known: dict[tuple[str, ...], Candidate | None] = field(default_factory=dict)

    def fitting(self, *, last: bool) -> list[Candidate]:
        """Return the simulated candidates that fit, fastest first; for ``last`` see :func:`candidates`."""
        given, before, tried = self._simulate(()), [], 0
        singles = {} if given is None else self._singles(last=last)
        costs = {changed: single.seconds / given.seconds for changed, single in singles.items()}
        found = candidates(self.settings, self.processes, last=last, experts=self.experts, costs=costs)
        for overrides, slower in found.items():
            fastest = min((one.seconds for one in self._list_fitting()), default=math.inf)
            if tried == MOST or (given is not None and given.seconds * slower > fastest * CLOSE):
                break
            if self._is_promising(overrides, singles, before):
                tried += overrides not in self.known
                self._simulate(overrides)
        return sorted(self._list_fitting(), key=lambda one: one.seconds)

    def _list_fitting(self) -> list[Candidate]:
        return [one for one in self.known.values() if one is not None and one.peak <= self.limit]

    def _simulate(self, overrides: tuple[str, ...]) -> Candidate | None:
        """Simulate overrides, once; None if the run rejects them."""
        if overrides not in self.known:
            try:
                self.known[overrides] = self.measure(overrides)
            except UserError as error:
                self.known[overrides] = None
                self.report(f"  refused: {' '.join(overrides)}: {error}")
            else:
                self.report(describe(self.known[overrides], self.limit))
        return self.known[overrides]

    def _singles(self, *, last: bool) -> dict[tuple[str, ...], Candidate]:
        """Simulate each change of a single lever that is valid alone."""
        options = itertools.chain(
            *_levers(SettingsView.of(self.settings), self.processes, last=last, experts=self.experts)
        )
        alone = [changed for changed, _ in options if changed and self._is_valid(changed)]
        return {changed: single for changed in alone if (single := self._simulate(changed)) is not None}

    def _is_valid(self, overrides: tuple[str, ...]) -> bool:
        try:
            self.check(overrides)
        except UserError:
            return False  # the recipe, its model or its mesh rejects the combination
        return True

    def _is_promising(
        self, overrides: tuple[str, ...], singles: Mapping[tuple[str, ...], Candidate], before: list[Saved]
    ) -> bool:
        """Return whether a combination is valid, each of its changes saves memory, and together they may fit."""
        if not self._is_valid(overrides):
            return False
        texts, given = set(overrides), self.known[()]
        changes = [changed for changed in singles if texts.issuperset(changed)]
        is_known = given is not None and texts == {text for changed in changes for text in changed}
        size = _expected(given, [singles[changed] for changed in changes]) if is_known else 0.0
        if any(less < texts and least <= size * SAVES_NOTHING for less, least in before):
            return False
        before.append((texts, size if is_known else math.inf))
        return size <= self.limit * MARGIN


def _expected(given: Candidate, singles: Sequence[Candidate]) -> float:
    """Predict the peak bytes of a combination: the product of its changes' ratios, by phase and component."""
    phases: Counter[str] = Counter()
    for (phase, component), size in (given.memory or {("", ""): given.peak}).items():
        others = [one.memory.get((phase, component), one.peak) for one in singles]
        phases[phase] += math.prod(other / size for other in others) * size if size else max(others, default=0.0)
    return max(phases.values())


def find_fastest(
    settings: Any,
    processes: int,
    device: Accelerator,
    limit: float,
    load: Callable[[Sequence[str]], Any],
    run: Callable[[Any], Estimate],
    report: Callable[[str], None],
) -> tuple[Candidate, Estimate]:
    """Search for the fastest settings with which a device needs at most ``limit`` bytes.

    Args:
        settings: initial settings.
        processes: number of processes.
        device: accelerator, for the step time.
        limit: memory of a device in bytes.
        load: returns checked settings with overrides; raises if they exclude each other.
        run: simulates settings.
        report: called with a line of text for every candidate.

    Raises:
        UserError: nothing fits.
    """
    estimates: dict[tuple[str, ...], Estimate] = {}

    def check(overrides: tuple[str, ...]) -> None:
        arrange(SettingsView.of(load(overrides)), processes)

    def measure(overrides: tuple[str, ...]) -> Candidate:
        found = estimates[overrides] = run(load(overrides))
        memory = {(phase, name): peak.components[name] for phase, peak in found.peaks.items() for name in COMPONENTS}
        seconds = step_time(found.work.values(), device).total / found.tokens * 1e6
        return Candidate(overrides, found.peak, seconds, memory)

    model = build_on_meta(SettingsView.of(settings))[0]
    experts = any(isinstance(module, MoE) for module in model.modules())
    search = Search(settings, processes, limit, check, measure, report, experts)
    for last in (False, True):
        for fastest in search.fitting(last=last):
            return fastest, estimates[fastest.overrides]
    raise UserError(_nothing(limit, min(filter(None, search.known.values()), key=lambda one: one.peak, default=None)))


def _nothing(limit: float, nearest: Candidate | None) -> str:
    """Return the error message of a search without a result."""
    least = ""
    if nearest is not None:
        changed = " ".join(nearest.overrides) or "the settings as configured"
        least = f"; the smallest needs {nearest.peak / 2**30:.1f} GiB, with {changed}"
    return (
        f"--fit: no candidate fits in {limit / 2**30:.1f} GiB{least}: use more or larger devices, shorter rows "
        "(tokenizer.max_seq_len) or adapters."
    )


def describe(candidate: Candidate, limit: float) -> str:
    """Return a line with a candidate's memory, time, verdict and overrides."""
    fits = "fits" if candidate.peak <= limit else "too large"
    changed = " ".join(candidate.overrides) or "as configured"
    return f"{candidate.peak / 2**30:7.1f} GiB {candidate.seconds:7.2f} s per million tokens  {fits:<10}{changed}"
