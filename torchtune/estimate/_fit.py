"""Search for the fastest settings that fit in memory, by combining levers that trade time for memory.

The search first simulates the given settings, and each change of a single lever. Combinations of levers are ordered by
the product of their slowdowns; combinations that cannot fit are excluded by the product of their savings per component
of memory. The remaining combinations are simulated, fastest first, until the next combination would be slower than the
fastest one that fits.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from torchtune.config import SettingsView
from torchtune.estimate._extrapolate import Estimate
from torchtune.estimate._ledger import COMPONENTS
from torchtune.estimate._plan import arrange, build_on_meta
from torchtune.estimate._roofline import Accelerator, step_time
from torchtune.modules.moe import MoE
from torchtune.supervision import StepPlan
from torchtune.utils import UserError

# Maximum number of combinations to simulate, in each of two rounds.
MAX_SIMULATIONS = 8
# Tolerated error of a product of slowdowns, as a factor.
CLOSE = 1.1
# Tolerated error of a product of savings, as a factor.
MARGIN = 1.25

# Tokens of a tile of feed-forward layers; shorter rows are not tiled.
TILE = 16_384
_TILED_MLP = "torchtune.modules.TiledMLP"

# Minimum factor by which an override must reduce memory.
MIN_SAVING = 1.02

# (overrides, rough slowdown of a step); the slowdown orders combinations that are not simulated yet.
Option = tuple[tuple[str, ...], float]
# (overrides, expected peak bytes).
PredictedPeak = tuple[set[str], float]


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


def _levers(cfg: SettingsView, processes: int, *, with_last_resorts: bool, has_experts: bool) -> list[list[Option]]:
    """Return the options of every lever: overrides, and the slowdown of a step relative to the initial settings.

    The slowdowns are those of typical runs. They only order the combinations that are not simulated yet.
    """
    levers = {
        "gradient_accumulation_steps": _micro_batches(cfg),
        "enable_activation_checkpointing": _recomputing(cfg),
        "enable_activation_offloading": _switch("enable_activation_offloading", 1.25),
        # Clipping needs all gradients at once, which steps in the backward pass do not keep.
        "optimizer_in_bwd": _switch("optimizer_in_bwd", 1.02, "clip_grad_norm=null"),
        "optimizer": _optimizers(cfg),
        "model": _base_weights(cfg),
    }
    if (cfg.max_seq_len or 0) > TILE:  # shorter rows fit in one tile
        levers["model_converters"] = _tiles_of_feed_forward(cfg)
    if processes > 1:
        levers["data_parallel_replicate_dim"] = _replicas(cfg)
    if processes > 1 and has_experts:
        levers["expert_parallel_dim"] = _parallel_sizes(cfg, processes, "expert_parallel_dim", 1.02)
    if processes > 1 and with_last_resorts:
        # The ranks of these dimensions are taken from those that shard the data.
        shard = "data_parallel_shard_dim=-1"
        levers["tensor_parallel_dim"] = _parallel_sizes(cfg, processes, "tensor_parallel_dim", 1.2, shard)
        levers["context_parallel_dim"] = _parallel_sizes(cfg, processes, "context_parallel_dim", 1.15, shard)
        levers["fsdp_cpu_offload"] = _switch("fsdp_cpu_offload", 3.0)
    # A recipe may lack a setting: its lever is left out.
    return [_relative_to_settings(cfg, options) for key, options in levers.items() if cfg.can_set(key)]


def _relative_to_settings(cfg: SettingsView, options: list[Option]) -> list[Option]:
    """Omit overrides that the settings already contain, and divide slowdowns by that of the settings."""
    changes = []
    initial_slowdown = None
    for overrides, slowdown in options:
        changed = tuple(override for override in overrides if not _is_in_settings(cfg, override))
        changes.append((changed, slowdown))
        if not changed and initial_slowdown is None:
            initial_slowdown = slowdown
    if initial_slowdown is None:  # the settings are none of the options
        initial_slowdown = 1.0
    return [(changed, slowdown / initial_slowdown) for changed, slowdown in changes]


def _micro_batches(cfg: SettingsView) -> list[Option]:
    """Return the options of splitting a step's rows into micro-batches: all rows at once, then powers of two."""
    rows = StepPlan.of(cfg).rows_per_step(data_size=1)
    options = []
    for size in range(rows, 0, -1):
        is_power_of_two = size & (size - 1) == 0
        if rows % size == 0 and (is_power_of_two or size == rows):
            overrides = (f"batch_size={size}", f"gradient_accumulation_steps={rows // size}")
            options.append((overrides, 1.05 ** math.log2(rows / size)))
    return options


def _switch(key: str, slowdown: float, *also: str) -> list[Option]:
    """Return the options of a setting that is False or True; True needs the overrides ``also``."""
    return [((f"{key}=False",), 1.0), ((f"{key}=True", *also), slowdown)]


def _recomputing(cfg: SettingsView) -> list[Option]:
    """Return the options of activation checkpointing: none, element-wise operations, every second layer, all layers."""
    never = "enable_activation_checkpointing=False"
    always = "enable_activation_checkpointing=True"
    if not (cfg.can_set("ac_mode") and cfg.can_set("ac_option")):
        return [((never,), 1.0), ((always,), 1.33)]
    return [
        ((never, "ac_mode=null", "ac_option=null"), 1.0),
        ((never, "ac_mode=selective", "ac_option=op"), 1.1),
        ((never, "ac_mode=selective", "ac_option=2"), 1.17),
        ((always, "ac_mode=null", "ac_option=null"), 1.33),
    ]


def _parallel_sizes(cfg: SettingsView, processes: int, key: str, slowdown: float, *also: str) -> list[Option]:
    """Return options for sharding over more ranks, in powers of two within a machine."""
    initial = getattr(cfg, key)
    options = []
    for size in (initial, 2 * initial, 4 * initial, 8 * initial):
        if size <= min(8, processes) and processes % size == 0:
            options.append(((f"{key}={size}", *also), slowdown ** math.log2(size / initial)))
    return options


def _replicas(cfg: SettingsView) -> list[Option]:
    """Return the number of replicas in the settings, and sharding over all ranks instead."""
    replicas = cfg.data_parallel_replicate_dim or 1
    options: list[Option] = [((f"data_parallel_replicate_dim={replicas}",), 1.0)]
    if replicas > 1:
        options.append((("data_parallel_replicate_dim=1", "data_parallel_shard_dim=-1"), 1.1))
    return options


def _optimizers(cfg: SettingsView) -> list[Option]:
    """Return the optimizer in the settings, and its variant with 8-bit states."""
    optimizer = ""
    if cfg.optimizer is not None:
        optimizer = str(cfg.optimizer.get("_component_"))
    options: list[Option] = [((f"optimizer._component_={optimizer}",), 1.0)]
    if optimizer == "torch.optim.AdamW":
        options.append((("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused"), 1.05))
    return options


def _base_weights(cfg: SettingsView) -> list[Option]:
    """Return the frozen weights in the settings, and the variant with 4-bit frozen weights."""
    model = ""
    if cfg.model is not None:
        model = str(cfg.model.get("_component_"))
    options: list[Option] = [((f"model._component_={model}",), 1.0)]
    package, _, builder = model.rpartition(".")
    if builder.startswith("lora_"):
        options.append(((f"model._component_={package}.q{builder}",), 1.35))
    return options


def _tiles_of_feed_forward(cfg: SettingsView) -> list[Option]:
    """Return the conversions in the settings, and with feed-forward layers in tiles of the sequence."""
    options: list[Option] = [((), 1.0)]
    converters = OmegaConf.to_container(OmegaConf.create(list(cfg.model_converters or [])))
    if all(converter["_component_"] != _TILED_MLP for converter in converters):
        converters.append({"_component_": _TILED_MLP, "tile_size": TILE})
        options.append(((f"model_converters={json.dumps(converters)}",), 1.02))  # JSON is YAML in one line
    return options


# Levers that are only tried if nothing fits without them.
LAST_RESORTS = ("tensor_parallel_dim", "context_parallel_dim", "fsdp_cpu_offload")


def candidates(
    settings: Any,
    processes: int,
    *,
    with_last_resorts: bool = False,
    has_experts: bool = False,
    costs: Mapping[tuple[str, ...], float] | None = None,
) -> dict[tuple[str, ...], float]:
    """Return the overrides of every combination of levers, with the estimated slowdown of a step, ascending.

    Args:
        settings: initial settings; overrides that they already contain are omitted.
        processes: number of processes.
        with_last_resorts: return only the combinations with a lever of ``LAST_RESORTS``, instead of only those without.
        has_experts: whether the model has experts, which expert parallelism can distribute.
        costs: simulated slowdowns of single changes; others use a rough factor.
    """
    levers = []
    levers_of_settings = _levers(
        SettingsView.of(settings), processes, with_last_resorts=with_last_resorts, has_experts=has_experts
    )
    for options in levers_of_settings:
        if costs is not None:
            options = [(changed, costs.get(changed, slowdown)) for changed, slowdown in options]
        levers.append(options)
    slowdowns: dict[tuple[str, ...], float] = {}
    for combination in itertools.product(*levers):
        overrides = []
        for changed, _ in combination:
            overrides.extend(changed)
        # Two levers may set the same key to the same value.
        key = tuple(dict.fromkeys(overrides))
        has_last_resort = any(override.startswith(LAST_RESORTS) for override in key)
        if has_last_resort is with_last_resorts:
            # The levers' slowdowns are taken as independent. Combinations with equal overrides are one candidate.
            slowdown = math.prod(factor for _, factor in combination)
            slowdowns[key] = min(slowdown, slowdowns.get(key, math.inf))
    # Of equally fast combinations, the one with fewer overrides comes first.
    fastest_first = sorted(slowdowns, key=lambda overrides: (slowdowns[overrides], len(overrides)))
    return {overrides: slowdowns[overrides] for overrides in fastest_first}


def _is_in_settings(cfg: SettingsView, override: str) -> bool:
    """Return whether the settings already contain an override, which is "key=value", or "~key" to delete a key."""
    key, _, value = override.partition("=")
    section, _, leaf = key.lstrip("~").partition(".")
    setting = getattr(cfg, section, None)
    if leaf and setting is not None:
        setting = setting.get(leaf)
    if key.startswith("~"):
        return setting is None
    return str(setting) == value.replace("null", "None")


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
        has_experts: whether the model has experts.
        simulated: simulated candidates by overrides; None if rejected.
    """

    settings: Any
    processes: int
    limit: float
    check: Callable[[tuple[str, ...]], Any]
    measure: Callable[[tuple[str, ...]], Candidate]
    report: Callable[[str], None]
    has_experts: bool = False
    simulated: dict[tuple[str, ...], Candidate | None] = field(default_factory=dict)

    def fitting(self, *, with_last_resorts: bool) -> list[Candidate]:
        """Return the simulated candidates that fit, fastest first; for ``with_last_resorts`` see :func:`candidates`."""
        initial = self._simulate(())  # no overrides: the settings as they are; None if the run rejects them
        singles = {}
        if initial is not None:  # otherwise there is nothing to compare them with
            singles = self._simulate_single_changes(with_last_resorts=with_last_resorts)
        costs = {changed: single.seconds / initial.seconds for changed, single in singles.items()}
        combinations = candidates(
            self.settings,
            self.processes,
            with_last_resorts=with_last_resorts,
            has_experts=self.has_experts,
            costs=costs,
        )
        predicted: list[PredictedPeak] = []
        simulations = 0
        for overrides, slowdown in combinations.items():
            fastest = min((candidate.seconds for candidate in self._list_fitting()), default=math.inf)
            if simulations == MAX_SIMULATIONS:
                break
            # Combinations are in order of time: all later ones are slower, too, even if the estimate errs by CLOSE.
            if initial is not None and initial.seconds * slowdown > fastest * CLOSE:
                break
            if self._is_promising(overrides, singles, predicted):
                if overrides not in self.simulated:  # single changes are, and cost nothing here
                    simulations += 1
                self._simulate(overrides)
        return sorted(self._list_fitting(), key=lambda candidate: candidate.seconds)

    def _list_fitting(self) -> list[Candidate]:
        """Return the simulated candidates that fit."""
        fitting = []
        for candidate in self.simulated.values():
            if candidate is not None and candidate.peak <= self.limit:
                fitting.append(candidate)
        return fitting

    def _simulate(self, overrides: tuple[str, ...]) -> Candidate | None:
        """Simulate overrides, once; None if the run rejects them."""
        if overrides not in self.simulated:
            try:
                self.simulated[overrides] = self.measure(overrides)
            except UserError as error:
                self.simulated[overrides] = None
                self.report(f"  refused: {' '.join(overrides)}: {error}")
            else:
                self.report(describe(self.simulated[overrides], self.limit))
        return self.simulated[overrides]

    def _simulate_single_changes(self, *, with_last_resorts: bool) -> dict[tuple[str, ...], Candidate]:
        """Simulate each change of a single lever that is valid alone."""
        levers = _levers(
            SettingsView.of(self.settings),
            self.processes,
            with_last_resorts=with_last_resorts,
            has_experts=self.has_experts,
        )
        singles = {}
        for changed, _ in itertools.chain(*levers):
            if changed and self._is_valid(changed):
                candidate = self._simulate(changed)
                if candidate is not None:
                    singles[changed] = candidate
        return singles

    def _is_valid(self, overrides: tuple[str, ...]) -> bool:
        """Return whether the overrides make settings that a run accepts."""
        try:
            self.check(overrides)
        except UserError:
            return False  # the recipe, its model or its mesh rejects the combination
        return True

    def _is_promising(
        self, overrides: tuple[str, ...], singles: Mapping[tuple[str, ...], Candidate], predicted: list[PredictedPeak]
    ) -> bool:
        """Return whether a combination is valid, each of its changes saves memory, and together they may fit.

        ``predicted`` has the combinations that were judged before; this one is added to it.
        """
        if not self._is_valid(overrides):
            return False
        override_set = set(overrides)
        initial = self.simulated[()]
        # A single change may have several overrides.
        single_changes = [single_change for single_change in singles if override_set.issuperset(single_change)]
        covered = set(itertools.chain(*single_changes))
        if initial is None or override_set != covered:
            # What cannot be predicted may fit, so that it is simulated; it says nothing about other combinations.
            predicted.append((override_set, math.inf))
            return True
        peak = _predict_peak(initial, [singles[single_change] for single_change in single_changes])
        for fewer_overrides, peak_with_fewer in predicted:
            if fewer_overrides < override_set and peak_with_fewer <= peak * MIN_SAVING:
                return False  # a part of the overrides needs about as little memory, and is faster
        predicted.append((override_set, peak))
        return peak <= self.limit * MARGIN  # the prediction may be too high by this factor


def _predict_peak(initial: Candidate, singles: Sequence[Candidate]) -> float:
    """Predict the peak bytes of a combination: the product of its changes' ratios, by phase and component."""
    phases: Counter[str] = Counter()
    memory = initial.memory or {("", ""): initial.peak}
    for (phase, component), size in memory.items():
        changed_sizes = [single.memory.get((phase, component), single.peak) for single in singles]
        if size:
            phases[phase] += math.prod(changed / size for changed in changed_sizes) * size
        else:  # without a ratio to the initial settings, the largest of the changes counts
            phases[phase] += max(changed_sizes, default=0.0)
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
        arrange(SettingsView.of(load(overrides)), processes)  # raises if the mesh does not fit

    def measure(overrides: tuple[str, ...]) -> Candidate:
        estimate = run(load(overrides))
        estimates[overrides] = estimate
        memory = {}
        for phase, peak in estimate.peaks.items():
            components = peak.components
            for component in COMPONENTS:
                memory[phase, component] = components[component]
        # Per million tokens, because overrides may change the tokens of a step.
        seconds = step_time(estimate.work.values(), device).total / estimate.tokens * 1e6
        return Candidate(overrides, estimate.peak, seconds, memory)

    model, _, _ = build_on_meta(settings)
    has_experts = any(isinstance(module, MoE) for module in model.modules())
    search = Search(settings, processes, limit, check, measure, report, has_experts)
    # Levers of LAST_RESORTS, such as tensor parallelism, are tried only if nothing fits without them.
    for with_last_resorts in (False, True):
        fitting = search.fitting(with_last_resorts=with_last_resorts)
        if fitting:
            fastest = fitting[0]
            return fastest, estimates[fastest.overrides]
    simulated = [candidate for candidate in search.simulated.values() if candidate is not None]
    smallest = ""
    if simulated:
        nearest = min(simulated, key=lambda candidate: candidate.peak)
        changed = " ".join(nearest.overrides) or "the settings as configured"
        smallest = f"; the smallest needs {nearest.peak / 2**30:.1f} GiB, with {changed}"
    raise UserError(
        f"--fit: no candidate fits in {limit / 2**30:.1f} GiB{smallest}: use more or larger devices, shorter rows "
        "(tokenizer.max_seq_len) or adapters."
    )


def describe(candidate: Candidate, limit: float) -> str:
    """Return a line with a candidate's memory, time, verdict and overrides."""
    verdict = "fits" if candidate.peak <= limit else "too large"
    changed = " ".join(candidate.overrides) or "as configured"
    return f"{candidate.peak / 2**30:7.1f} GiB {candidate.seconds:7.2f} s per million tokens  {verdict:<10}{changed}"
