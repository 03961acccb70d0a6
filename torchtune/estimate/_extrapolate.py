"""Extrapolate the requirements of a run with all layers from simulations with few layers.

Layers of one kind have the same modules, parameters and attention. The first simulation keeps the first layers, the
last layers, and the last layer of every kind. The second simulation has additional layers of each kind, such that ``n``
times these additional layers are the layers that the first simulation omits. The full run has the FLOPs, communication
and memory of the first simulation plus ``n`` times the difference of the two simulations.

Memory is extrapolated for each moment. A moment is the forward or backward pass of a layer that both simulations have,
next to layers of the same size. Between the first and the last layers, memory changes linearly. The full model may
therefore reach its peak at another moment than a model with few layers.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtune.estimate._cluster import simulated_cluster
from torchtune.estimate._ledger import COMPONENTS, PHASES, Moment, Peak, highest_by_phase
from torchtune.estimate._observer import Observer, Work, magnitude
from torchtune.estimate._plan import arrange, build_on_meta, count_parameters, row_length
from torchtune.estimate._simulate import Kept, check_simulated, simulate
from torchtune.estimate._simulated_inputs import stacks
from torchtune.training import SettingsView
from torchtune.training.parallel import ParallelDims
from torchtune.utils import simulated

# Names of other models -> their settings.
_SETTINGS = {"teacher": "teacher_model", "reference": "ref_model"}


@dataclass(frozen=True)
class Estimate:
    """Memory and work of one step of a run.

    Attributes:
        settings: settings of the run.
        dims: parallel dimensions.
        length: tokens per row.
        length_is_assumed: whether ``length`` is a default, because the settings have no row length.
        layers: number of layers of the model, including its vision tower.
        simulated: number of layers in each simulation.
        parameters: numbers of (all, trained) parameters.
        moments: peak memory of a device in each moment, in the order of the step.
        work: FLOPs, memory traffic and communication by phase.
        host: bytes of host memory per process.
    """

    settings: SettingsView
    dims: ParallelDims
    length: int
    length_is_assumed: bool
    layers: int
    simulated: tuple[int, ...]
    parameters: tuple[int, int]
    moments: dict[Moment, Peak]
    work: dict[str, Work]
    host: float

    @property
    def peaks(self) -> dict[str, Peak]:
        """Peak memory of a device, by phase."""
        return highest_by_phase(self.moments)

    @property
    def peak(self) -> float:
        """Peak memory of a device in bytes."""
        return max(peak.total for peak in self.moments.values())

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        cfg = self.settings
        return cfg.batch_size * cfg.gradient_accumulation_steps * self.dims.data_size * self.length


def estimate_run(
    main: Callable[[Any], Any],
    settings: Any,
    processes: int = 1,
    *,
    per_machine: int = 8,
    whole: bool = False,
    length: int | None = None,
) -> Estimate:
    """Simulate a step of a run with few layers, and extrapolate to all layers.

    Args:
        main: ``recipe_main`` of a recipe.
        settings: checked settings, as for a real run.
        processes: number of processes.
        per_machine: number of processes per machine.
        whole: simulate all layers.
        length: tokens of the longest row of the data; by default from the settings.

    Raises:
        ParallelDimsError, RecipeSettingsError: the mesh does not fit the number of processes.
        SimulationError: the recipe needs something that a simulated run lacks.
        UserError: the run itself would raise it.
    """
    cfg = SettingsView.of(settings)
    dims = arrange(cfg, processes)
    check_simulated(cfg)
    with simulated(), simulated_cluster(processes, per_machine):
        views = {"model": cfg} | {_SETTINGS[name]: other for name, (_, other) in cfg.other_models().items()}
        models = {key: build_on_meta(view)[0] for key, view in views.items()}
        length, is_assumed = row_length(cfg, models["model"], length)
        depth = _depth(models["model"])
        parts = [(1.0, {})] if whole else choose_layers(models, _group(cfg), ends=1 if processes == 1 else 2)
        runs = [
            (weight, simulate(main, settings, processes, length=length, kept=kept, models=models, micro_batches=1))
            for weight, kept in parts
        ]
    return Estimate(
        cfg,
        dims,
        length,
        is_assumed,
        depth,
        tuple(sum(len(some) for (key, _), some in kept.items() if key == "model") or depth for _, kept in parts),
        tuple(map(sum, zip(*map(count_parameters, models.values()), strict=True))),
        _moments(runs),
        _work(runs),
        sum(weight * _host(run) for weight, run in runs),
    )


def _moments(runs: Sequence[tuple[float, Observer]]) -> dict[Moment, Peak]:
    peaks = [(weight, run.ledger.peaks()) for weight, run in runs]
    common = [moment for moment in peaks[0][1] if all(moment in found for _, found in peaks)]
    return {moment: Peak.combine((weight, found[moment]) for weight, found in peaks) for moment in common}


def _work(runs: Sequence[tuple[float, Observer]]) -> dict[str, Work]:
    return {
        phase: Work.combine((weight, run.work[step, phase]) for weight, run in runs)
        for step, phase in list(runs[0][1].work)
        if phase != PHASES[0]
    }


def _host(run: Observer) -> int:
    return sum(run.ledger.held(component, on_host=True) for component in COMPONENTS)


def _group(cfg: SettingsView) -> int:
    """Return n if the recipe recomputes every n-th layer, otherwise 1; groups of n layers stay together."""
    return int(cfg.ac_option) if cfg.ac_mode == "selective" and str(cfg.ac_option).isdigit() else 1


def choose_layers(models: Mapping[str, nn.Module], group: int = 1, ends: int = 1) -> list[tuple[float, Kept]]:
    """Choose the layers of one or two simulations, and their weights in the sum of results.

    Args:
        models: models on the meta device, by the name of their setting.
        group: number of consecutive layers that stay together.
        ends: number of layers (or groups) to keep at both ends; more than 1 with FSDP, which prefetches a layer.

    Returns:
        (weight, indices of the kept layers by setting and stack) of each simulation.
    """
    split = {
        (key, name): _split(stack, group, ends)
        for key, model in models.items()
        for name, stack in stacks(model).items()
    }
    omitted = [len(groups) for _, kinds in split.values() for groups in kinds]
    # Both simulations keep the remainder, the second also the quotient: choose the factor with the fewest layers.
    factor = min(
        range(1, max(omitted, default=0) + 2), key=lambda n: sum(2 * (size % n) + size // n for size in omitted)
    )

    def keep(times: int) -> Kept:
        found = {}
        for where, (kept, kinds) in split.items():
            counts = [len(kind) % factor + times * (len(kind) // factor) for kind in kinds]
            added = (one for kind, count in zip(kinds, counts, strict=True) for one in kind[:count])
            found[where] = sorted(itertools.chain(*kept, *added))
        return found

    few, more = keep(0), keep(1)
    if sum(map(len, (*few.values(), *more.values()))) >= sum(map(_depth, models.values())):
        return [(1, {})]
    return [(1 - factor, few), (factor, more)]


def _depth(model: nn.Module) -> int:
    return sum(len(stack.layers) for stack in stacks(model).values())


def _split(stack: nn.Module, group: int, ends: int) -> tuple[set[tuple[int, ...]], list[list[tuple[int, ...]]]]:
    """Return the groups of layers that both simulations keep, and all other groups by kind."""
    layers, full = list(stack.layers), getattr(stack, "full_layers", ())
    groups = [tuple(range(len(layers)))[start : start + group] for start in range(0, len(layers), group)]
    kinds: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for one in groups:
        kinds.setdefault(tuple((_kind(layers[index]), index in full) for index in one), []).append(one)
    kept = {*groups[:ends], *groups[-ends:], *(alike[-1] for alike in kinds.values())}
    read_later = {*getattr(stack, "kv_sources", {}).values(), *getattr(stack, "deep_layers", ())}
    kept |= {one for one in groups if {*one} & read_later}
    if ends > 1:  # keep neighbors of unequal size, because FSDP holds two neighbors at a time
        sizes = {one: magnitude(layers[one[-1]]) for one in groups}
        unlike = [at for at, pair in enumerate(itertools.pairwise(groups)) if sizes[pair[0]] != sizes[pair[1]]]
        kept |= {one for at in unlike[:1] for one in groups[at : at + 3]}
        below, nearest = (sorted(some)[-ends - 1 : -ends] for some in (groups, kept))
        if [sizes[one] for one in below] != [sizes[one] for one in nearest]:
            kept |= {*below}
    return kept, [[one for one in alike if one not in kept] for alike in kinds.values()]


def _kind(layer: nn.Module) -> str:
    """Return a key that is equal for layers with equal memory and FLOPs."""
    modules = [
        (name, type(module), getattr(module, "window", None), getattr(module, "chunk", None))
        for name, module in layer.named_modules()
    ]
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    return repr((modules, parameters))
