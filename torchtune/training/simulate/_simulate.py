"""Run a user's recipe for two steps, without weights, data, files or devices."""

import contextlib
import copy
import dataclasses
import io
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtune import config
from torchtune.modules.conversion import full_shapes
from torchtune.training._settings_view import SettingsView
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.training.plan._plan import arrange
from torchtune.training.plan._plan_data import nodes_of
from torchtune.training.simulate import _stand_ins
from torchtune.training.simulate._cluster import one_thread, simulated_cluster
from torchtune.training.simulate._observer import Observer
from torchtune.training.simulate._stand_ins import SimulationError
from torchtune.training.simulate._torch_private import FakeTensorMode
from torchtune.utils import simulated

STEPS = 2
ASSUMED_LENGTH = 2048
_HERE = _stand_ins.__name__


@dataclass(frozen=True)
class Simulation:
    """What two steps of a run took.

    Attributes:
        observer: what was counted.
        settings: of the run, as the user gave them.
        dims: how its processes are arranged.
        length: tokens of a row.
        length_is_assumed: whether the settings do not say it.
        parameters: (all, trained).
        layers: of the model as described.
    """

    observer: Observer
    settings: SettingsView
    dims: ParallelDims
    length: int
    length_is_assumed: bool
    parameters: tuple[int, int]
    layers: int


def simulate(
    main: Callable[[Any], Any],
    settings: Any,
    processes: int = 1,
    *,
    per_machine: int = 8,
    observer: Observer | None = None,
    layers: int | None = None,
    micro_batches: int | None = None,
) -> Simulation:
    """Run ``main`` for two steps and count what they take. No file is read but a ``config.json``, and none written.

    Args:
        main: ``recipe_main`` of a recipe.
        settings: checked settings, for a real run; those about data, files and the length of the run are replaced.
        processes: of the run, simulated.
        per_machine: of them on a machine.
        observer: counts; one that is not ``fake`` lets the recipe compute with real tensors, on as many real processes,
            which the caller has started.
        layers: to leave of the model, from the first; all by default.
        micro_batches: of a step to run at most, all by default. The work of forward and backward passes is multiplied
            to that of all; the peak of two is that of more.

    Raises:
        ParallelDimsError, RecipeSettingsError: the mesh does not fit the processes.
        SimulationError: the recipe asks for something that a simulated run does not have.
        UserError: as the run itself.
    """
    cfg = SettingsView.of(settings)
    dims = arrange(cfg, processes)
    length, is_assumed = row_length(cfg)
    observer = Observer() if observer is None else observer
    observer.offload = cfg.fsdp_cpu_offload and processes > 1
    models: list[nn.Module] = []
    accumulated = min(cfg.gradient_accumulation_steps, micro_batches or cfg.gradient_accumulation_steps)
    changes = {"gradient_accumulation_steps": accumulated, **_cut(cfg, layers)}
    rows = STEPS * cfg.batch_size * accumulated * dims.data_size
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(simulated())
        stack.enter_context(one_thread())
        stack.enter_context(_silence())
        if observer.fake:
            stack.enter_context(simulated_cluster(processes, per_machine))
        modes = stack.enter_context(ExitStack())

        def begin() -> None:
            if not models and not observer.entered:
                if observer.fake:
                    modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                modes.enter_context(observer)

        def loaded(model: nn.Module) -> None:
            observer.loaded(model, f"model {len(models) + 1}" if models else "model")
            models.append(model)

        stack.enter_context(_set(_stand_ins.before_load, begin))
        stack.enter_context(_set(_stand_ins.on_load, loaded))
        main(_replaced(settings, cfg, folder, rows, length, changes))
    if not models:
        raise SimulationError(
            f"{main.__module__}: the recipe loads no model by checkpointer.load_model(model), so there is nothing to "
            "simulate."
        )
    observer.multiply(cfg.gradient_accumulation_steps / accumulated)
    sizes = [(p.requires_grad, math.prod(shape)) for model in models for p, shape in full_shapes(model).items()]
    trained, total = sum(size for is_trained, size in sizes if is_trained), sum(size for _, size in sizes)
    described = getattr(models[0], "description", None)
    depth = getattr(described, "num_layers", 0)
    return Simulation(observer, cfg, dims, length, is_assumed, (total, trained), depth)


def row_length(cfg: SettingsView) -> tuple[int, bool]:
    """(tokens of a row, whether that is assumed)."""
    nodes = nodes_of(cfg.dataset)
    given = [cfg.max_seq_len, *(node.get("max_seq_len") for node in nodes if node is not None)]
    known = [length for length in given if length]
    return (min(known), False) if known else (ASSUMED_LENGTH, True)


def _cut(cfg: SettingsView, layers: int | None) -> dict[str, Any]:
    """The setting of a model with few layers."""
    if layers is None:
        return {}
    return {"model": {"_component_": f"{_HERE}.shallow", "model": cfg.model, "layers": layers}}


def check_simulated(settings: Any) -> None:
    """Raise :class:`SimulationError` for data that have no stand-in."""
    if "images" in str(SettingsView.of(settings).collate_fn):
        raise SimulationError("collate_fn: a run with images cannot be simulated: use --dry-run.")


def _replaced(settings: Any, cfg: SettingsView, folder: str, rows: int, length: int, changes: Mapping[str, Any]) -> Any:
    """The settings with these changes, stand-ins for files, and two steps to do."""
    check_simulated(cfg)
    kind = "texts" if cfg.loss is None else getattr(config.instantiate(cfg.loss), "trains_on", "texts")
    if kind == "prompts":
        raise SimulationError("loss: a recipe that samples answers cannot be simulated: use --dry-run.")
    if cfg.teacher_cache is not None:
        raise SimulationError("teacher_cache: it is of rows that a simulated run does not have: set it to null.")
    data = {"_component_": f"{_HERE}.StandInDataset", "rows": rows, "length": length, "kind": kind}
    changes = {
        **changes,
        "output_dir": folder,
        "tokenizer": {"_component_": f"{_HERE}.StandInTokenizer", "max_seq_len": length},
        "metric_logger": {"_component_": f"{_HERE}.StandInLogger"},
        "dataset": data,
        "dataset_val": None,
        "run_val_every_n_steps": None,
        "keep_best": None,
        "early_stopping_patience": None,
        "profiler": None,
        "resume_from_checkpoint": False,
        "device": "cpu",
        "compile": False,
        "epochs": 1,
        "max_steps_per_epoch": STEPS,
        "hang_timeout_minutes": None,
        "share_prefix": False,  # what answers have in common is not known
        "log_level": "ERROR",
    }
    for key, value in _items(settings):
        if isinstance(value, Mapping) and key.endswith("checkpointer"):
            changes[key] = {"_component_": f"{_HERE}.StandInCheckpointer"}
    if cfg.lr_scheduler is not None and "num_warmup_steps" in cfg.lr_scheduler:
        changes["lr_scheduler"] = {**cfg.lr_scheduler, "num_warmup_steps": 0}
    if dataclasses.is_dataclass(settings):
        known = {item.name for item in dataclasses.fields(settings)}
        return dataclasses.replace(settings, **{key: value for key, value in changes.items() if key in known})
    kept = copy.deepcopy(settings)  # a DictConfig
    for key, value in changes.items():
        if key in kept:
            kept[key] = value
    return kept


def _items(settings: Any) -> Iterable[tuple[str, Any]]:
    if dataclasses.is_dataclass(settings):
        return [(item.name, getattr(settings, item.name)) for item in dataclasses.fields(settings)]
    return settings.items()


@contextmanager
def _set(variable: Any, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def _silence() -> Iterator[None]:
    """A block of which nothing is printed."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield
