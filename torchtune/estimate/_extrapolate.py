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

from torchtune.config import SettingsView
from torchtune.estimate._ledger import COMPONENTS, PHASES, Moment, Peak, highest_by_phase
from torchtune.estimate._observer import Observer, Work, magnitude, stacks
from torchtune.estimate._plan import arrange, build_on_meta, count_parameters, other_models, row_length
from torchtune.estimate._simulate import Kept, simulate, simulated_cluster, simulated_kind
from torchtune.supervision import StepPlan
from torchtune.training import OffloadActivations
from torchtune.training.parallel import ParallelDims
from torchtune.utils import simulated

# Names of other models -> their settings.
_SETTINGS = {"teacher": "teacher_model", "reference": "ref_model"}
# Indices of consecutive layers that stay together.
LayerGroup = tuple[int, ...]


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
        return StepPlan.of(self.settings).rows_per_step(self.dims.data_size) * self.length


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

    Example:
        >>> estimate = torchtune.estimate.estimate_run(recipe_main, settings, 8)  # doctest: +SKIP
        >>> print(f"{estimate.peak / 2**30:.1f} GiB per device")  # doctest: +SKIP
        36.2 GiB per device
    """
    cfg = SettingsView.of(settings)
    dims = arrange(cfg, processes)
    simulated_kind(cfg)  # raises if the run cannot be simulated
    with simulated(), simulated_cluster(processes, per_machine):
        views = {"model": cfg}
        for name, (_, view) in other_models(cfg).items():
            views[_SETTINGS[name]] = view
        models = {}
        for key, view in views.items():
            models[key], _, _ = build_on_meta(view)
        length, is_assumed = row_length(cfg, models["model"], length)
        if whole:
            choices: list[tuple[float, Kept]] = [(1.0, {})]  # without a choice, a simulation keeps all layers
        else:
            ends = 1
            if processes > 1:  # FSDP prefetches a layer
                ends = 2
            first = 0
            if cfg.enable_activation_offloading:
                # That many tensors wait for their copies to the host, so that the activations of these layers may all
                # be on the device: a layer that is recomputed saves a single tensor. Two layers more are kept, so that
                # memory no longer grows with the layers where some are omitted.
                first = OffloadActivations.MAX_FWD_STASH_SIZE + 2
            choices = choose_layers(models, _group(cfg), ends=ends, first=first)
        runs = []
        for weight, layers in choices:
            # All micro-batches of a step need the same work and memory: one stands for them.
            observer = simulate(main, settings, processes, length=length, kept=layers, models=models, micro_batches=1)
            runs.append((weight, observer))
    depth = _depth(models["model"])
    simulated_depths = []
    for _, layers in choices:
        # Layers of other models do not count; without a choice, all layers were simulated.
        num_layers = sum(len(indices) for (setting, _), indices in layers.items() if setting == "model")
        simulated_depths.append(num_layers or depth)
    host = 0.0
    for weight, observer in runs:
        for component in COMPONENTS:
            host += weight * observer.ledger.held(component, on_host=True)
    total = 0
    trained = 0
    for model in models.values():
        model_total, model_trained = count_parameters(model)
        total += model_total
        trained += model_trained
    return Estimate(
        settings=cfg,
        dims=dims,
        length=length,
        length_is_assumed=is_assumed,
        layers=depth,
        simulated=tuple(simulated_depths),
        parameters=(total, trained),
        moments=_extrapolate_moments(runs),
        work=_extrapolate_work(runs),
        host=host,
    )


def _extrapolate_moments(runs: Sequence[tuple[float, Observer]]) -> dict[Moment, Peak]:
    """Return the weighted sum of the simulations' peaks in each moment."""
    peaks_of_runs = [(weight, observer.ledger.peaks()) for weight, observer in runs]
    first = peaks_of_runs[0][1]
    moments = {}
    for moment in first:
        # A moment that not all simulations have cannot be extrapolated.
        if all(moment in peaks for _, peaks in peaks_of_runs):
            moments[moment] = Peak.combine((weight, peaks[moment]) for weight, peaks in peaks_of_runs)
    return moments


def _extrapolate_work(runs: Sequence[tuple[float, Observer]]) -> dict[str, Work]:
    """Return the weighted sum of the simulations' work in each phase after the set-up."""
    first = runs[0][1]
    works = {}
    for step, phase in list(first.work):
        if phase != PHASES[0]:
            works[phase] = Work.combine((weight, observer.work[step, phase]) for weight, observer in runs)
    return works


def _group(cfg: SettingsView) -> int:
    """Return n if the recipe recomputes every n-th layer, otherwise 1; groups of n layers stay together."""
    if cfg.ac_mode == "selective" and str(cfg.ac_option).isdigit():
        return int(cfg.ac_option)
    return 1


def choose_layers(
    models: Mapping[str, nn.Module], group: int = 1, ends: int = 1, first: int = 0
) -> list[tuple[float, Kept]]:
    """Choose the layers of one or two simulations, and their weights in the sum of results.

    Args:
        models: models on the meta device, by the name of their setting.
        group: number of consecutive layers that stay together.
        ends: number of layers (or groups) to keep at both ends; more than 1 with FSDP, which prefetches a layer.
        first: number of layers (or groups) to keep at the beginning, if more than ``ends``.

    Returns:
        (weight, indices of the kept layers by setting and stack) of each simulation.
    """
    splits = {}
    for setting, model in models.items():
        for name, stack in stacks(model).items():
            splits[setting, name] = _split(stack, group, ends, first)
    counts = []  # of the groups of each kind that are not kept always
    for _, kinds in splits.values():
        counts.extend(len(groups) for groups in kinds)

    def count_simulated(factor: int) -> int:
        """Return the number of these groups that are simulated if the difference is multiplied by a factor."""
        # Both simulations keep the remainder, the second also the quotient.
        return sum(2 * (count % factor) + count // factor for count in counts)

    # The factor with the fewest simulated groups. With a factor above all counts, both simulations keep all layers: a
    # single simulation is cheaper then, see below.
    factor = min(range(1, max(counts, default=0) + 2), key=count_simulated)

    def keep(times: int) -> Kept:
        """Return the layers of a simulation that has ``times`` the quotient of each kind."""
        layers_of_stacks = {}
        for stack_key, (always_kept, kinds) in splits.items():
            layers = list(itertools.chain(*always_kept))
            for groups in kinds:
                count = len(groups) % factor + times * (len(groups) // factor)
                layers.extend(itertools.chain(*groups[:count]))
            layers_of_stacks[stack_key] = sorted(layers)
        return layers_of_stacks

    fewer_layers = keep(0)
    more_layers = keep(1)
    num_simulated = sum(len(layers) for layers in (*fewer_layers.values(), *more_layers.values()))
    if num_simulated >= sum(_depth(model) for model in models.values()):
        return [(1, {})]  # one simulation of all layers costs less than the two
    # The sum is fewer + factor * (more - fewer): the factor times the quotient, and the remainder, are all groups.
    return [(1 - factor, fewer_layers), (factor, more_layers)]


def _depth(model: nn.Module) -> int:
    """Return the number of layers of a model, including its vision tower."""
    return sum(len(stack.layers) for stack in stacks(model).values())


def _split(stack: nn.Module, group: int, ends: int, first: int) -> tuple[set[LayerGroup], list[list[LayerGroup]]]:
    """Return the groups of layers that both simulations keep, and all other groups by kind.

    Groups of a kind need the same memory and work. So a simulation may leave most of them out: what it measures grows
    linearly with their number.
    """
    layers = list(stack.layers)
    full_layers = getattr(stack, "full_layers", ())  # layers of a vision tower that attend without a window
    groups: list[LayerGroup] = []
    for start in range(0, len(layers), group):
        groups.append(tuple(range(start, min(start + group, len(layers)))))
    kinds: dict[tuple[Any, ...], list[LayerGroup]] = {}
    for indices in groups:
        kind = tuple((_kind(layers[index]), index in full_layers) for index in indices)
        kinds.setdefault(kind, []).append(indices)

    always_kept = {*groups[: max(first, ends)], *groups[-ends:]}
    # One group of each kind, so that its moments are measured in both.
    always_kept.update(groups_of_kind[-1] for groups_of_kind in kinds.values())
    # Layers whose keys and values, or whose output, later modules read.
    read_later = set(getattr(stack, "kv_sources", {}).values())
    read_later.update(getattr(stack, "deep_layers", ()))
    always_kept.update(indices for indices in groups if not read_later.isdisjoint(indices))
    if ends > 1:  # FSDP prefetches a layer, so that a moment also holds its neighbor's weights
        always_kept |= _unequal_neighbors(layers, groups, always_kept, ends)

    repeated = []
    for groups_of_kind in kinds.values():
        repeated.append([indices for indices in groups_of_kind if indices not in always_kept])
    return always_kept, repeated


def _unequal_neighbors(
    layers: Sequence[nn.Module], groups: Sequence[LayerGroup], always_kept: set[LayerGroup], ends: int
) -> set[LayerGroup]:
    """Return groups that stand next to a group of another size, because FSDP holds two neighbors at a time.

    Args:
        layers: all layers of a stack.
        groups: all groups of its layers, in order.
        always_kept: groups that both simulations keep.
        ends: number of groups kept at both ends.
    """
    neighbors: set[LayerGroup] = set()
    sizes = {indices: magnitude(layers[indices[-1]]) for indices in groups}
    for start, (indices, following) in enumerate(itertools.pairwise(groups)):
        if sizes[indices] != sizes[following]:
            neighbors.update(groups[start : start + 3])
            break  # the first change of size stands for the later ones
    # The group before the last ones must have the size that it has in the whole stack.
    before_end = sorted(groups)[-ends - 1 : -ends]
    kept_before_end = sorted(always_kept | neighbors)[-ends - 1 : -ends]
    if [sizes[indices] for indices in before_end] != [sizes[indices] for indices in kept_before_end]:
        neighbors.update(before_end)
    return neighbors


def _kind(layer: nn.Module) -> str:
    """Return a key that is equal for layers with equal memory and FLOPs."""
    modules = []
    for name, module in layer.named_modules():
        # Attention has its own FLOPs for each window or chunk.
        modules.append((name, type(module), getattr(module, "window", None), getattr(module, "chunk", None)))
    parameters = []
    for name, parameter in layer.named_parameters():
        parameters.append((name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad))
    return repr((modules, parameters))
