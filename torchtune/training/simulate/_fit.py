"""The fastest settings with which a run fits: levers that trade time for memory, tried in the order of what they cost.

What a lever costs is simulated: the settings as given, and each change of one lever. The costs of several are
multiplied, which decides the order alone. The closed form leaves out what cannot fit; the rest is simulated, the
fastest first, until what follows would be slower than the fastest that fits. Candidates are simulated with few layers,
at two depths: memory and time grow by the same amount with every layer of a decoder. What seems to fit is simulated
with all layers before it is shown. Of a step's micro-batches two are simulated.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtune.modules.moe import MoE
from torchtune.training._settings_view import SettingsView
from torchtune.training.plan._plan import ClosedForm
from torchtune.training.simulate._depths import extrapolate, peak_of_all, two_depths
from torchtune.training.simulate._devices import Accelerator
from torchtune.training.simulate._report import peak_bytes, tokens_per_step
from torchtune.training.simulate._roofline import step_time
from torchtune.training.simulate._simulate import Simulation
from torchtune.utils import UserError

# Combinations of levers that are simulated at most, in each of two rounds.
MOST = 8
# What the product of single costs may be wrong by, as a factor.
CLOSE = 1.1
# What the closed form may be wrong by, as a factor, without a candidate being left out.
MARGIN = 1.25

# One more override that leaves less of the memory is worth a try.
SAVES_NOTHING = 1.02

# Overrides, and how much longer a step takes with them, roughly: the order of what cannot be simulated alone.
Option = tuple[tuple[str, ...], float]


@dataclass(frozen=True)
class Candidate:
    """Settings, and what they take.

    Attributes:
        overrides: as on the command line.
        peak: bytes of a device.
        seconds: of a step, for each million tokens of it.
    """

    overrides: tuple[str, ...]
    peak: float
    seconds: float


def _batches(cfg: SettingsView, processes: int) -> Iterator[Option]:
    """The same rows a step and rank, more or fewer of them at a time."""
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
    """Activations of no layer, of cheap operators, of every second layer, of all."""
    yield ("enable_activation_checkpointing=False", *(("ac_mode=null", "ac_option=null") if _selects(cfg) else ())), 1.0
    if _selects(cfg):
        for option, slower in (("op", 1.1), ("2", 1.17)):
            yield ("enable_activation_checkpointing=False", "ac_mode=selective", f"ac_option={option}"), slower
    yield ("enable_activation_checkpointing=True", *(("ac_mode=null", "ac_option=null") if _selects(cfg) else ())), 1.33


def _selects(cfg: SettingsView) -> bool:
    return cfg.can_set("ac_mode") and cfg.can_set("ac_option")


def _splits(key: str, slower: float, *more: str) -> Callable[[SettingsView, int], Iterator[Option]]:
    """More ranks for each layer, sequence or set of experts, in powers of two within a machine."""

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
    """States of 8 bits instead of 16 or 32."""
    given = str(cfg.optimizer.get("_component_"))
    yield (f"optimizer._component_={given}",), 1.0
    if given == "torch.optim.AdamW":
        yield ("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused"), 1.05


def _bases(cfg: SettingsView, processes: int) -> Iterator[Option]:
    """Frozen weights of 4 bits."""
    given = str(cfg.model.get("_component_"))
    yield (f"model._component_={given}",), 1.0
    package, _, name = given.rpartition(".")
    if name.startswith("lora_"):
        yield (f"model._component_={package}.q{name}",), 1.35


# What a recipe must declare for a lever -> its options. A setting that the recipe lacks leaves its lever out.
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
# Tried only where nothing fits without them.
LAST = ("tensor_parallel_dim", "context_parallel_dim", "fsdp_cpu_offload")


def candidates(
    settings: Any,
    processes: int,
    *,
    last: bool = False,
    experts: bool = False,
    costs: Mapping[tuple[str, ...], float] | None = None,
) -> dict[tuple[str, ...], float]:
    """Overrides of every combination of levers, with the time of a step as a multiple of that as given, ascending.

    Args:
        settings: to start from; overrides that say what these do are left out.
        processes: of the run.
        last: combinations with a lever of ``LAST``, in the place of those without.
        experts: whether the model has experts, which ranks can share out.
        costs: what is known of single changes; a rough factor stands for the others.
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
    """The options of every lever: what each changes, and the time of a step relative to that as given."""
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
    """Whether the settings say so already."""
    key, _, value = text.partition("=")
    section, _, leaf = key.lstrip("~").partition(".")
    given = getattr(cfg, section, None)
    if leaf:
        given = None if given is None else given.get(leaf)
    return given is None if key.startswith("~") else str(given) == value.replace("null", "None")


@dataclass
class Search:
    """The search, without what it asks.

    Attributes:
        settings: to start from.
        processes: of the run.
        limit: bytes of a device.
        estimate: bytes of a device with overrides, at once; raises where they do not go together.
        measure: what overrides take, simulated; raises where the run refuses them.
        say: is told of every candidate.
        experts: whether the model has experts.
        known: what was measured; None where it was refused.
    """

    settings: Any
    processes: int
    limit: float
    estimate: Callable[[tuple[str, ...]], float]
    measure: Callable[[tuple[str, ...]], Candidate]
    say: Callable[[str], None]
    experts: bool = False
    known: dict[tuple[str, ...], Candidate | None] = field(default_factory=dict)

    def fitting(self, *, last: bool) -> list[Candidate]:
        """All that fits of what was simulated, the fastest first; ``last`` as for :func:`candidates`."""
        given, before, tried = self._of(()), [], 0
        found = candidates(
            self.settings, self.processes, last=last, experts=self.experts, costs=self._costs(given, last=last)
        )
        for overrides, slower in found.items():
            fastest = min((one.seconds for one in self._that_fit()), default=math.inf)
            if tried == MOST or (given is not None and given.seconds * slower > fastest * CLOSE):
                break
            if self._is_promising(overrides, before):
                tried += overrides not in self.known
                self._of(overrides)
        return sorted(self._that_fit(), key=lambda one: one.seconds)

    def _that_fit(self) -> list[Candidate]:
        return [one for one in self.known.values() if one is not None and one.peak <= self.limit]

    def _of(self, overrides: tuple[str, ...]) -> Candidate | None:
        """What overrides take; None if the run refuses them."""
        if overrides not in self.known:
            try:
                self.known[overrides] = self.measure(overrides)
            except UserError as error:
                self.known[overrides] = None
                self.say(f"  refused: {' '.join(overrides)}: {error}")
            else:
                self.say(describe(self.known[overrides], self.limit))
        return self.known[overrides]

    def _costs(self, given: Candidate | None, *, last: bool) -> dict[tuple[str, ...], float]:
        """Times of a step with one change, relative to that as given, of changes that save memory or may save time."""
        found: dict[tuple[str, ...], float] = {}
        if given is None:
            return found
        for options in _levers(SettingsView.of(self.settings), self.processes, last=last, experts=self.experts):
            for changed, slower in options:
                if not changed or (slower >= 1 and not self._saves(changed)):
                    continue
                single = self._of(changed)
                if single is not None:
                    found[changed] = single.seconds / given.seconds
        return found

    def _saves(self, changed: tuple[str, ...]) -> bool:
        try:
            return self.estimate(changed) * SAVES_NOTHING < self.estimate(())
        except UserError:
            return False  # not alone

    def _is_promising(self, overrides: tuple[str, ...], before: list[tuple[set[str], float]]) -> bool:
        """Whether a candidate goes together, may fit as far as the closed form says, and every lever saves memory."""
        try:
            size = self.estimate(overrides)
        except UserError:
            return False  # a combination that the recipe, its model or its mesh refuses
        texts = set(overrides)
        if any(less < texts and least <= size * SAVES_NOTHING for less, least in before):
            return False
        before.append((texts, size))
        return size <= self.limit * MARGIN


def find_fastest(
    settings: Any,
    processes: int,
    device: Accelerator,
    limit: float,
    load: Callable[[Sequence[str]], Any],
    run: Callable[[Any, int | None], Simulation],
    say: Callable[[str], None],
) -> tuple[Candidate, Simulation]:
    """Search the fastest settings with which a device needs at most ``limit`` bytes.

    Args:
        settings: to start from.
        processes: of the run.
        device: predicts the time.
        limit: bytes.
        load: checks the settings with overrides; raises where they do not go together.
        run: simulates settings, with so many layers or (None) all of them.
        say: is told of every candidate.

    Raises:
        UserError: none was found.
    """
    closed = ClosedForm()

    def estimate(overrides: tuple[str, ...]) -> float:
        return closed.estimate(load(overrides), processes, what=" ".join(overrides)).total

    def measure(overrides: tuple[str, ...]) -> Candidate:
        changed = load(overrides)
        depths = two_depths(closed.model(changed)[0])
        return _of_all(overrides, [run(changed, layers) for layers in depths or (None,)], depths, device)

    experts = any(isinstance(module, MoE) for module in closed.model(settings)[0].modules())
    search = Search(settings, processes, limit, estimate, measure, say, experts)
    wholes: dict[tuple[str, ...], Candidate] = {}
    for last in (False, True):
        for candidate in search.fitting(last=last):
            if candidate.overrides in wholes:
                continue
            whole = run(load(candidate.overrides), None)
            found = wholes[candidate.overrides] = _of(candidate.overrides, whole, device)
            if found.peak <= limit:
                return found, whole
            say(f"{describe(found, limit)} (whole)")
    simulated = {**search.known, **wholes}.values()
    raise UserError(_nothing(limit, min(filter(None, simulated), key=lambda one: one.peak, default=None), closed))


def _nothing(limit: float, nearest: Candidate | None, closed: ClosedForm) -> str:
    """The sentence for a search that found nothing."""
    if nearest is None and closed.smallest is not None:
        size, what = closed.smallest
        nearest = Candidate((what,) if what else (), size, 0.0)
    least = ""
    if nearest is not None:
        what = " ".join(nearest.overrides) or "the settings as configured"
        least = f"; nearest come {nearest.peak / 2**30:.1f} GiB with {what}"
    return (
        f"--fit: nothing that was tried fits into {limit / 2**30:.1f} GiB{least}: take more or larger devices, shorter "
        "rows (tokenizer.max_seq_len) or adapters."
    )


def _of(overrides: tuple[str, ...], simulation: Simulation, device: Accelerator) -> Candidate:
    seconds = step_time(simulation.observer, device).total / tokens_per_step(simulation) * 1e6
    return Candidate(overrides, peak_bytes(simulation), seconds)


def _of_all(
    overrides: tuple[str, ...], simulations: Sequence[Simulation], depths: tuple[int, int] | None, device: Accelerator
) -> Candidate:
    """What all layers take."""
    if depths is None:
        return _of(overrides, simulations[0], device)
    seconds = extrapolate(simulations, depths, lambda one: _of(overrides, one, device).seconds)
    return Candidate(overrides, peak_of_all(simulations, depths), seconds)


def describe(candidate: Candidate, limit: float) -> str:
    """A line of the search."""
    fits = "fits" if candidate.peak <= limit else "too large"
    what = " ".join(candidate.overrides) or "as configured"
    return f"{candidate.peak / 2**30:7.1f} GiB {candidate.seconds:7.2f} s a million tokens  {fits:<10}{what}"
