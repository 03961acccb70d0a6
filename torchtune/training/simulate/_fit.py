"""The fastest settings with which a run fits: levers that trade time for memory, tried in the order of what they cost.

The closed form leaves out what cannot fit. Of the rest the cheapest are simulated with few layers, at two depths, and
the fastest of those is taken: memory and time grow by the same amount with every layer of a decoder. What seems to fit
is simulated with all layers before it is shown. Of a step's micro-batches two are simulated.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchtune.modules.moe import MoE
from torchtune.training._recipe_settings import RecipeSettings
from torchtune.training.plan._plan import ClosedForm
from torchtune.training.simulate._depths import extrapolate, peak_of_all, two_depths
from torchtune.training.simulate._devices import Accelerator
from torchtune.training.simulate._report import peak_bytes, tokens_per_step
from torchtune.training.simulate._roofline import step_time
from torchtune.training.simulate._simulate import Simulation
from torchtune.utils import UserError

# Candidates that are simulated at most, and that must fit before the fastest of them is taken.
MOST, ENOUGH = 8, 3
# What the closed form may be wrong by, as a factor, without a candidate being left out.
MARGIN = 1.25

# One more override that leaves less of the memory is worth a try.
SAVES_NOTHING = 1.02

# Overrides, and how much longer a step takes with them, roughly: it decides the order, not the answer.
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


def _batches(cfg: RecipeSettings, processes: int) -> Iterator[Option]:
    """The same rows a step and rank, more or fewer of them at a time."""
    rows = cfg.batch_size * cfg.gradient_accumulation_steps
    for size in (size for size in range(rows, 0, -1) if rows % size == 0 and (size & (size - 1) == 0 or size == rows)):
        slower = 1.05 ** math.log2(rows / size)
        yield (f"batch_size={size}", f"gradient_accumulation_steps={rows // size}"), slower


def _switch(key: str, slower: float, *more: str) -> Callable[[RecipeSettings, int], Iterator[Option]]:
    def options(cfg: RecipeSettings, processes: int) -> Iterator[Option]:
        yield (f"{key}=False",), 1.0
        yield (f"{key}=True", *more), slower

    return options


def _recomputing(cfg: RecipeSettings, processes: int) -> Iterator[Option]:
    """Activations of no layer, of cheap operators, of every second layer, of all."""
    yield ("enable_activation_checkpointing=False", *(("ac_mode=null", "ac_option=null") if _selects(cfg) else ())), 1.0
    if _selects(cfg):
        for option, slower in (("op", 1.1), ("2", 1.17)):
            yield ("enable_activation_checkpointing=False", "ac_mode=selective", f"ac_option={option}"), slower
    yield ("enable_activation_checkpointing=True", *(("ac_mode=null", "ac_option=null") if _selects(cfg) else ())), 1.33


def _selects(cfg: RecipeSettings) -> bool:
    return cfg.can_set("ac_mode") and cfg.can_set("ac_option")


def _splits(key: str, slower: float, *more: str) -> Callable[[RecipeSettings, int], Iterator[Option]]:
    """More ranks for each layer, sequence or set of experts, in powers of two within a machine."""

    def options(cfg: RecipeSettings, processes: int) -> Iterator[Option]:
        given = getattr(cfg, key)
        for size in sorted({given, 2 * given, 4 * given, 8 * given}):
            if size <= min(8, processes) and processes % size == 0:
                yield (f"{key}={size}", *more), slower ** math.log2(size / given)

    return options


def _shards(cfg: RecipeSettings, processes: int) -> Iterator[Option]:
    yield (f"data_parallel_replicate_dim={cfg.data_parallel_replicate_dim}",), 1.0
    if cfg.data_parallel_replicate_dim > 1:
        yield ("data_parallel_replicate_dim=1", "data_parallel_shard_dim=-1"), 1.1


def _optimizers(cfg: RecipeSettings, processes: int) -> Iterator[Option]:
    """States of 8 bits instead of 16 or 32."""
    given = str(cfg.optimizer.get("_component_"))
    yield (f"optimizer._component_={given}",), 1.0
    if given == "torch.optim.AdamW":
        yield ("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused"), 1.05


def _bases(cfg: RecipeSettings, processes: int) -> Iterator[Option]:
    """Frozen weights of 4 bits."""
    given = str(cfg.model.get("_component_"))
    yield (f"model._component_={given}",), 1.0
    package, _, name = given.rpartition(".")
    if name.startswith("lora_"):
        yield (f"model._component_={package}.q{name}",), 1.35


# What a recipe must declare for a lever -> its options. A setting that the recipe lacks leaves its lever out.
LEVERS: tuple[tuple[str, Callable[[RecipeSettings, int], Iterator[Option]]], ...] = (
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


def candidates(settings: Any, processes: int, *, last: bool = False, experts: bool = False) -> list[tuple[str, ...]]:
    """Overrides of every combination of levers, those that cost least time first; what is as given is left out.

    Args:
        settings: to start from.
        processes: of the run.
        last: combinations with a lever of ``LAST``, in the place of those without.
        experts: whether the model has experts, which ranks can share out.
    """
    cfg = RecipeSettings.of(settings)
    levers = [
        (key, make)
        for key, make in LEVERS
        if cfg.can_set(key)
        and (processes > 1 or key not in _ON_MANY)
        and (last or key not in LAST)
        and (experts or key != "expert_parallel_dim")
    ]
    found: dict[tuple[str, ...], float] = {}
    for chosen in itertools.product(*(list(make(cfg, processes)) for _, make in levers)):
        overrides = tuple(dict.fromkeys(text for texts, _ in chosen for text in texts))
        changed = tuple(text for text in overrides if not _is_given(cfg, text))
        if last is any(text.startswith(LAST) for text in changed):
            slower = math.prod(factor for _, factor in chosen)
            found[changed] = min(slower, found.get(changed, math.inf))
    return sorted(found, key=lambda overrides: (found[overrides], len(overrides)))


def _is_given(cfg: RecipeSettings, text: str) -> bool:
    """Whether the settings say so already."""
    key, _, value = text.partition("=")
    section, _, leaf = key.lstrip("~").partition(".")
    given = getattr(cfg, section, None)
    if leaf:
        given = None if given is None else given.get(leaf)
    return given is None if key.startswith("~") else str(given) == value.replace("null", "None")


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
    closed, nearest = ClosedForm(), None
    for last in (False, True):
        simulated: list[Candidate] = []
        for overrides in _promising(settings, processes, limit, load, closed, last=last):
            try:
                changed = load(overrides)
                depths = two_depths(closed.model(changed)[0])
                simulations = [run(changed, layers) for layers in depths or (None,)]
            except UserError as error:
                say(f"  refused: {' '.join(overrides)}: {error}")
                continue
            candidate = _of_all(overrides, simulations, depths, device)
            say(describe(candidate, limit))
            simulated.append(candidate)
            if len(simulated) == MOST or sum(candidate.peak <= limit for candidate in simulated) == ENOUGH:
                break
        for candidate in sorted(simulated, key=lambda candidate: candidate.seconds):
            if candidate.peak <= limit:
                whole = run(load(candidate.overrides), None)
                found = _of(candidate.overrides, whole, device)
                if found.peak <= limit:
                    return found, whole
                say(f"{describe(found, limit)} (whole)")
                candidate = found
            nearest = min(filter(None, (nearest, candidate)), key=lambda one: one.peak)
    raise UserError(_nothing(limit, nearest, closed))


def _promising(
    settings: Any,
    processes: int,
    limit: float,
    load: Callable[[Sequence[str]], Any],
    closed: ClosedForm,
    *,
    last: bool,
) -> Iterator[tuple[str, ...]]:
    """Candidates that go together, that may fit as far as the closed form says, and whose every lever saves memory."""
    before: list[tuple[set[str], int]] = []
    experts = any(isinstance(module, MoE) for module in closed.model(settings)[0].modules())
    for overrides in candidates(settings, processes, last=last, experts=experts):
        try:
            estimate = closed.estimate(load(overrides), processes, what=" ".join(overrides))
        except UserError:
            continue  # a combination that the recipe, its model or its mesh refuses
        texts = set(overrides)
        if any(less < texts and size <= estimate.total * SAVES_NOTHING for less, size in before):
            continue
        before.append((texts, estimate.total))
        if estimate.total <= limit * MARGIN:
            yield overrides


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
