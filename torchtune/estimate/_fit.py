"""Search for the fastest settings that fit in memory, by combining levers that trade time for memory.

What a lever costs and saves is simulated: the settings as given, and each change of one lever. The costs of several
are multiplied, which decides the order alone; so is what they leave of each component of the memory, which leaves out
what cannot fit. The rest is simulated, the fastest first, until what follows would be slower than the fastest that
fits.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# Tolerated error of the product of single costs, as a factor.
CLOSE = 1.1
# What the product of single savings may be wrong by, as a factor, without a candidate being left out.
MARGIN = 1.25

# Minimum factor by which an override must reduce memory.
SAVES_NOTHING = 1.02

# Overrides, and a rough slowdown of a step, which orders combinations of unknown cost.
Option = tuple[tuple[str, ...], float]
# Overrides, and the bytes that they are expected to need.
Saved = tuple[set[str], float]


@dataclass(frozen=True)
class Candidate:
    """Overrides, with their memory and time.

    Attributes:
        overrides: as on the command line.
        peak: bytes of a device.
        seconds: of a step, for each million tokens of it.
        memory: most bytes, by phase and component.
    """

    overrides: tuple[str, ...]
    peak: float
    seconds: float
    memory: Mapping[tuple[str, str], float] = field(default_factory=dict)


def _batches(cfg: SettingsView, processes: int) -> Iterator[Option]:
    """Yield smaller micro-batches with the same rows per step and rank."""
    rows = cfg.batch_size * cfg.gradient_accumulation_steps
    for size in (size for size in range(rows, 0, -1) if rows % size == 0 and (size & (size - 1) == 0 or size == rows)):
        slower = 1.05 ** math.log2(rows / size)
        yield (f"batch_size={size}", f"gradient_accumulation_steps={rows // size}"), slower


def _switch(key: str, slower: float, *more: str) -> Callable[[SettingsView, int], Iterator[Option]]:
    def options(cfg: SettingsView, processes: int) -> Iterator[Option]:
        yield (f"{key}=False",), 1.0
        yield (f"{key}=True", *more), slower

    return options


def _recomputing(cfg: SettingsView, processes: int) -> Iterator[Option]:
    """Yield activation checkpointing of no layer, of element-wise operations, of every second layer, of all layers."""
    yield ("enable_activation_checkpointing=False", *(("ac_mode=null", "ac_option=null") if _selects(cfg) else ())), 1.0
    if _selects(cfg):
        for option, slower in (("op", 1.1), ("2", 1.17)):
            yield ("enable_activation_checkpointing=False", "ac_mode=selective", f"ac_option={option}"), slower
    yield ("enable_activation_checkpointing=True", *(("ac_mode=null", "ac_option=null") if _selects(cfg) else ())), 1.33


def _selects(cfg: SettingsView) -> bool:
    return cfg.can_set("ac_mode") and cfg.can_set("ac_option")


def _splits(key: str, slower: float, *more: str) -> Callable[[SettingsView, int], Iterator[Option]]:
    """Return options for sharding over more ranks, in powers of two within a machine."""

    def options(cfg: SettingsView, processes: int) -> Iterator[Option]:
        given = getattr(cfg, key)
        for size in sorted({given, 2 * given, 4 * given, 8 * given}):
            if size <= min(8, processes) and processes % size == 0:
                yield (f"{key}={size}", *more), slower ** math.log2(size / given)

    return options


def _shards(cfg: SettingsView, processes: int) -> Iterator[Option]:
    yield (f"data_parallel_replicate_dim={cfg.data_parallel_replicate_dim}",), 1.0
    if cfg.data_parallel_replicate_dim > 1:
        yield ("data_parallel_replicate_dim=1", "data_parallel_shard_dim=-1"), 1.1


def _optimizers(cfg: SettingsView, processes: int) -> Iterator[Option]:
    """Yield 8-bit optimizer states instead of 16 or 32 bits."""
    given = str(cfg.optimizer.get("_component_"))
    yield (f"optimizer._component_={given}",), 1.0
    if given == "torch.optim.AdamW":
        yield ("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused"), 1.05


def _bases(cfg: SettingsView, processes: int) -> Iterator[Option]:
    """Yield 4-bit frozen weights."""
    given = str(cfg.model.get("_component_"))
    yield (f"model._component_={given}",), 1.0
    package, _, name = given.rpartition(".")
    if name.startswith("lora_"):
        yield (f"model._component_={package}.q{name}",), 1.35


# Levers by the setting that a recipe must declare for them.
LEVERS: tuple[tuple[str, Callable[[SettingsView, int], Iterator[Option]]], ...] = (
    ("gradient_accumulation_steps", _batches),
    ("enable_activation_checkpointing", _recomputing),
    ("enable_activation_offloading", _switch("enable_activation_offloading", 1.25)),
    ("optimizer_in_bwd", _switch("optimizer_in_bwd", 1.02, "clip_grad_norm=null")),
    ("optimizer", _optimizers),
    ("model", _bases),
    ("data_parallel_replicate_dim", _shards),
    ("expert_parallel_dim", _splits("expert_parallel_dim", 1.02)),
    ("tensor_parallel_dim", _splits("tensor_parallel_dim", 1.2, "data_parallel_shard_dim=-1")),
    ("context_parallel_dim", _splits("context_parallel_dim", 1.15, "data_parallel_shard_dim=-1")),
    ("fsdp_cpu_offload", _switch("fsdp_cpu_offload", 3.0)),
)
_ON_MANY = (
    "data_parallel_replicate_dim",
    "expert_parallel_dim",
    "tensor_parallel_dim",
    "context_parallel_dim",
    "fsdp_cpu_offload",
)
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


def _levers(cfg: SettingsView, processes: int, *, last: bool, experts: bool) -> list[list[Option]]:
    """Return the options of every lever: overrides, and the slowdown of a step relative to the initial settings."""
    found = []
    for key, make in LEVERS:
        if (
            cfg.can_set(key)
            and (processes > 1 or key not in _ON_MANY)
            and (last or key not in LAST)
            and (experts or key != "expert_parallel_dim")
        ):
            options = [
                (tuple(text for text in texts if not _is_given(cfg, text)), slower)
                for texts, slower in make(cfg, processes)
            ]
            given = next((slower for changed, slower in options if not changed), 1.0)
            found.append([(changed, slower / given) for changed, slower in options])
    return found


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
    """The search, independent of how candidates are estimated and measured.

    Attributes:
        settings: to start from.
        processes: of the run.
        limit: bytes of a device.
        check: raises where overrides do not go together.
        measure: what overrides take, simulated; raises where the run refuses them.
        say: is told of every candidate.
        experts: whether the model has experts.
        known: simulated candidates; None for rejected overrides.
    """

    settings: Any
    processes: int
    limit: float
    check: Callable[[tuple[str, ...]], Any]
    measure: Callable[[tuple[str, ...]], Candidate]
    say: Callable[[str], None]
    experts: bool = False
    known: dict[tuple[str, ...], Candidate | None] = field(default_factory=dict)

    def fitting(self, *, last: bool) -> list[Candidate]:
        """Return the simulated candidates that fit, fastest first; ``last`` as in :func:`candidates`."""
        given, before, tried = self._of(()), [], 0
        singles = {} if given is None else self._singles(last=last)
        costs = {changed: single.seconds / given.seconds for changed, single in singles.items()}
        found = candidates(self.settings, self.processes, last=last, experts=self.experts, costs=costs)
        for overrides, slower in found.items():
            fastest = min((one.seconds for one in self._that_fit()), default=math.inf)
            if tried == MOST or (given is not None and given.seconds * slower > fastest * CLOSE):
                break
            if self._is_promising(overrides, singles, before):
                tried += overrides not in self.known
                self._of(overrides)
        return sorted(self._that_fit(), key=lambda one: one.seconds)

    def _that_fit(self) -> list[Candidate]:
        return [one for one in self.known.values() if one is not None and one.peak <= self.limit]

    def _of(self, overrides: tuple[str, ...]) -> Candidate | None:
        """Simulate overrides, once; None if the run rejects them."""
        if overrides not in self.known:
            try:
                self.known[overrides] = self.measure(overrides)
            except UserError as error:
                self.known[overrides] = None
                self.say(f"  refused: {' '.join(overrides)}: {error}")
            else:
                self.say(describe(self.known[overrides], self.limit))
        return self.known[overrides]

    def _singles(self, *, last: bool) -> dict[tuple[str, ...], Candidate]:
        """What every change of one lever takes, as far as it can be made alone."""
        options = itertools.chain(
            *_levers(SettingsView.of(self.settings), self.processes, last=last, experts=self.experts)
        )
        alone = [changed for changed, _ in options if changed and self._goes(changed)]
        return {changed: single for changed in alone if (single := self._of(changed)) is not None}

    def _goes(self, overrides: tuple[str, ...]) -> bool:
        try:
            self.check(overrides)
        except UserError:
            return False  # a combination that the recipe, its model or its mesh refuses
        return True

    def _is_promising(
        self, overrides: tuple[str, ...], singles: Mapping[tuple[str, ...], Candidate], before: list[Saved]
    ) -> bool:
        """Whether a candidate goes together, may fit by what its changes save alone, and each of them saves memory."""
        if not self._goes(overrides):
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
    """Bytes of a device with several changes, from what each of them leaves of every component."""
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
    say: Callable[[str], None],
) -> tuple[Candidate, Estimate]:
    """Search the fastest settings with which a device needs at most ``limit`` bytes.

    Args:
        settings: to start from.
        processes: of the run.
        device: predicts the time.
        limit: bytes.
        load: checks the settings with overrides; raises where they do not go together.
        run: simulates settings.
        say: is told of every candidate.

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
    search = Search(settings, processes, limit, check, measure, say, experts)
    for last in (False, True):
        for fastest in search.fitting(last=last):
            return fastest, estimates[fastest.overrides]
    raise UserError(_nothing(limit, min(filter(None, search.known.values()), key=lambda one: one.peak, default=None)))


def _nothing(limit: float, nearest: Candidate | None) -> str:
    """The sentence for a search that found nothing."""
    least = ""
    if nearest is not None:
        what = " ".join(nearest.overrides) or "the settings as configured"
        least = f"; nearest come {nearest.peak / 2**30:.1f} GiB with {what}"
    return (
        f"--fit: nothing that was tried fits into {limit / 2**30:.1f} GiB{least}: take more or larger devices, shorter "
        "rows (tokenizer.max_seq_len) or adapters."
    )


def describe(candidate: Candidate, limit: float) -> str:
    """Return a line about a candidate."""
    fits = "fits" if candidate.peak <= limit else "too large"
    what = " ".join(candidate.overrides) or "as configured"
    return f"{candidate.peak / 2**30:7.1f} GiB {candidate.seconds:7.2f} s a million tokens  {fits:<10}{what}"
