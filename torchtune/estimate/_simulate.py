"""Run a recipe for a step, without weights, data, files or devices: stand-ins take their place in its settings."""

import contextlib
import copy
import dataclasses
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from torchtune import config
from torchtune.checkpoints import CheckpointStore, materialize
from torchtune.config import SettingsView
from torchtune.data import ExampleDataset, Images
from torchtune.estimate._observer import Observer, stacks
from torchtune.estimate._plan import arrange, row_length
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.transformer import text_decoder
from torchtune.modules.vision_transformer import VisionTower
from torchtune.supervision import StepPlan
from torchtune.utils import FakeTensorMode, UserError, fake_store, forget_meshes, simulated

# What the stand-ins at the end of this module need of a simulation: the recipe builds them from its settings alone.
# Called before the first model gets its weights; tensors are fake from then on.
_before_load: ContextVar[Callable[[], None]] = ContextVar("before_load")
# Called with each model after its weights are loaded.
_on_load: ContextVar[Callable[[nn.Module], None]] = ContextVar("on_load")
# Converted models on the meta device, by the name of their setting.
_meta_models: ContextVar[Mapping[str, nn.Module]] = ContextVar("meta_models")
# Description of the model, if its rows have images.
_image_description: ContextVar[Any] = ContextVar("image_description", default=None)
# Layers to keep by the names of the model's setting and of the stack of layers; other models keep all layers.
Kept = Mapping[tuple[str, str], Sequence[int]]


class SimulationError(UserError):
    """Raised if a run cannot be simulated."""


def simulate(
    main: Callable[[Any], Any],
    settings: Any,
    processes: int = 1,
    *,
    length: int | None = None,
    per_machine: int = 8,
    observer: Observer | None = None,
    kept: Kept | None = None,
    models: Mapping[str, nn.Module] | None = None,
    micro_batches: int | None = None,
    steps: int = 1,
) -> Observer:
    """Run ``main``, and count its memory and work. At most a ``config.json`` is read, and no file is written.

    Args:
        main: ``recipe_main`` of a recipe.
        settings: checked settings, as for a real run; data, files and the length of the run are replaced.
        processes: number of simulated processes.
        length: tokens per row; by default from the settings.
        per_machine: number of processes per machine.
        observer: counts memory and work. If it is not ``fake``, the recipe computes with real tensors in real
            processes, which the caller has started.
        kept: layers of ``models`` to keep.
        models: converted models on the meta device, by the name of their setting.
        micro_batches: maximum number of micro-batches to run per step; by default all. The work of forward and
            backward passes is multiplied accordingly, and gradients count as accumulated.
        steps: number of optimizer steps.

    Raises:
        ParallelDimsError, RecipeSettingsError: the parallel dimensions do not fit the processes.
        SimulationError: the recipe needs something that a simulated run lacks.
        UserError: the run itself would raise it.
    """
    cfg = SettingsView.of(settings)
    dims = arrange(cfg, processes)
    plan = StepPlan.of(cfg)
    micro_batches_per_step = plan.gradient_accumulation_steps
    if observer is None:
        observer = Observer()
    observer.accumulates = micro_batches == 1 and micro_batches_per_step > 1
    observer.offload = bool(cfg.fsdp_cpu_offload) and processes > 1  # one process has no FSDP
    if length is None:
        length, _ = row_length(cfg)
    accumulated = min(micro_batches_per_step, micro_batches or micro_batches_per_step)
    # As many as the steps read, so that an epoch has them all.
    rows = steps * plan.batch_size * accumulated * dims.data_size
    changes: dict[str, Any] = {
        "gradient_accumulation_steps": accumulated,
        "max_steps_per_epoch": steps,
        "max_steps": None,
    }
    if kept:
        changes |= _shallow_models(kept)
    num_loads = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(simulated())
        stack.enter_context(_set_variable(_image_description, None))
        stack.enter_context(one_thread())
        # The recipe's own output would look like that of a run.
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if observer.fake:
            stack.enter_context(simulated_cluster(processes, per_machine))
        # Entered last, so that the modes are left before the cluster ends.
        modes = stack.enter_context(ExitStack())

        def begin() -> None:
            """Let tensors be fake and count operators, from the first model on."""
            if not observer.entered:  # called for every model
                if observer.fake:
                    modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                modes.enter_context(observer)

        def record_loaded(model: nn.Module) -> None:
            """Record a model with its weights."""
            nonlocal num_loads
            num_loads += 1
            name = "model"
            if num_loads > 1:
                name += f" {num_loads}"
            observer.record_model(model, name)

        # The recipe builds the stand-ins from its settings, so that they read these values from context variables.
        stack.enter_context(_set_variable(_meta_models, models or {}))
        stack.enter_context(_set_variable(_before_load, begin))
        stack.enter_context(_set_variable(_on_load, record_loaded))
        main(_replaced(settings, cfg, folder, rows, length, changes))
    if num_loads == 0:
        raise SimulationError(
            f"{main.__module__}: the recipe never calls checkpointer.load_model(model), which the simulation needs: "
            "load the model with it."
        )
    observer.multiply(micro_batches_per_step / accumulated)  # 1 if all micro-batches were run
    return observer


def simulated_kind(settings: Any) -> str:
    """Return the kind of rows that the loss trains on: "texts", "answers", "pairs", "retrieval" ….

    Raises:
        SimulationError: a run with ``settings`` cannot be simulated.
    """
    cfg = SettingsView.of(settings)
    if cfg.optimizer is None and cfg.dataset is None:
        raise SimulationError("The recipe has neither 'optimizer' nor 'dataset': only training can be simulated.")
    if "images" in str(cfg.collate_fn):
        raise SimulationError("collate_fn: a run with tiles of images cannot be simulated: use --dry-run.")
    kind = "texts"
    if cfg.loss is not None:
        kind = getattr(config.instantiate(cfg.loss), "trains_on", kind)
    if kind == "prompts":
        raise SimulationError("loss: a recipe that samples answers cannot be simulated: use --dry-run.")
    if cfg.teacher_cache is not None:
        raise SimulationError("teacher_cache: a simulated run has no rows to look up in it: set it to null.")
    return kind


def _shallow_models(kept: Kept) -> dict[str, Any]:
    """Return settings that build each model with few layers."""
    settings: dict[str, Any] = {"model_converters": []}  # the models are converted already
    for (setting, stack_name), layers in kept.items():
        if setting not in settings:
            settings[setting] = {"_component_": f"{__name__}.shallow", "setting": setting, "layers": {}}
        settings[setting]["layers"][stack_name] = list(layers)
    return settings


def _replaced(settings: Any, cfg: SettingsView, folder: str, rows: int, length: int, changes: Mapping[str, Any]) -> Any:
    """Return the settings with ``changes``, with stand-ins for files, and without what does not belong to a step.

    Validation, logging, profiling, watchdog, compilation and resuming are switched off.
    """
    data = {"_component_": f"{__name__}.StandInDataset", "rows": rows, "length": length, "kind": simulated_kind(cfg)}
    changes = {
        **changes,
        "output_dir": folder,
        "tokenizer": {"_component_": f"{__name__}.StandInTokenizer", "max_seq_len": length},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.SilentLogger"},
        "dataset": data,
        "dataset_val": None,
        "run_val_every_n_steps": None,
        "keep_best": None,
        "early_stopping_patience": None,
        "scores": [],
        "profiler": None,
        "resume_from_checkpoint": False,
        "device": "cpu",  # fake tensors need no accelerator
        "compile": False,
        "epochs": 1,
        "hang_timeout_minutes": None,
        "share_prefix": False,  # the common prefix of answers is unknown
        "log_level": "ERROR",
    }
    if dataclasses.is_dataclass(settings):
        values = {setting.name: getattr(settings, setting.name) for setting in dataclasses.fields(settings)}
    else:  # a DictConfig
        values = dict(settings.items())
    for key, value in values.items():
        if isinstance(value, Mapping) and key.endswith("checkpointer"):
            changes[key] = {"_component_": f"{__name__}.StandInCheckpointer"}
    if cfg.lr_scheduler is not None:
        # The simulated run is shorter than the phases of its schedule.
        num_steps = {name: 0 for name in ("num_warmup_steps", "num_decay_steps") if name in cfg.lr_scheduler}
        changes["lr_scheduler"] = {**cfg.lr_scheduler, **num_steps}
    # A recipe lacks some of these settings.
    declared = {key: value for key, value in changes.items() if key in values}
    if dataclasses.is_dataclass(settings):
        return dataclasses.replace(settings, **declared)
    replaced = copy.deepcopy(settings)
    for key, value in declared.items():
        replaced[key] = value
    return replaced


def _gather_from_this_rank(objects: list[Any], own_object: Any, *_: Any, **__: Any) -> None:
    """Return this rank's object for every rank."""
    objects[:] = [own_object] * len(objects)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Take the place of a collective that changes nothing if all ranks are equal."""


@contextmanager
def simulated_cluster(processes: int, per_machine: int) -> Iterator[None]:
    """Make this process rank 0 of ``processes`` inside the block.

    Nothing is sent, and received tensors are uninitialized. CPU process groups are simulated, too. Object collectives
    return this rank's objects.

    Args:
        processes: number of processes; 1 changes nothing, nor does a nested block of the same size.
        per_machine: processes per machine.
    """
    is_nested = dist.is_initialized() and dist.get_backend() == "fake" and dist.get_world_size() == processes
    if processes == 1 or is_nested:
        yield
        return
    local = min(processes, per_machine)
    environment = {  # as torchrun sets it; nothing connects to the address
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "simulated",
        "MASTER_PORT": "1",
    }
    new_group = dist.new_group  # torch's own functions, which are replaced below
    destroy = dist.destroy_process_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        """Make a process group that sends nothing, whatever its backend."""
        return new_group(*args, **{**kwargs, "backend": "fake"})

    replacements = {
        "new_group": fake_group,
        "all_gather_object": _gather_from_this_rank,
        "broadcast_object_list": _do_nothing,
        "barrier": _do_nothing,
        "monitored_barrier": _do_nothing,
        "destroy_process_group": _do_nothing,  # called by the recipe; the group ends with the block
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=processes)
        stack.callback(destroy)
        # Meshes of another cluster may be equal to this one's, and have other process groups: before and after.
        forget_meshes()
        stack.callback(forget_meshes)
        for name, function in replacements.items():
            # Torch's own code looks the functions up in the module that defines them.
            for owner in (dist, dist.distributed_c10d):
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run backward passes in the calling thread inside the block, because dispatch modes are per thread."""
    was_enabled = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        yield
    finally:
        torch.autograd.set_multithreading_enabled(was_enabled)


@contextmanager
def _set_variable(variable: Any, value: Any) -> Iterator[None]:
    """Context manager that sets a context variable."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def shallow(setting: str, layers: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a copy of a setting's model with only the given layers of its stacks; other modules are kept."""
    model = _meta_models.get()[setting]
    all_layers = {name: stack.layers for name, stack in stacks(model).items()}
    # Layers are omitted before the copy, because all of them would take long to copy.
    try:
        for name, stack in stacks(model).items():
            stack.layers = nn.ModuleList(all_layers[name][index] for index in layers[name])
        copied = copy.deepcopy(model)
    finally:
        for name, stack in stacks(model).items():
            stack.layers = all_layers[name]
    for name, stack in stacks(copied).items():
        stack.kept_layers = tuple(layers[name])  # read by Observer.record_model
        # Indices of layers in the model -> in the copy.
        new_index = {index: position for position, index in enumerate(layers[name])}
        kv_sources = getattr(stack, "kv_sources", None)
        if kv_sources:
            kept_sources = {}
            for reader, source in kv_sources.items():  # of layers that read the keys and values of another one
                if reader in new_index:  # its source is kept as well: choose_layers keeps all sources
                    kept_sources[new_index[reader]] = new_index[source]
            stack.kv_sources = kept_sources
        if isinstance(stack, VisionTower):
            stack.full_layers = frozenset(new_index[index] for index in stack.full_layers if index in new_index)
            stack.deep_layers = tuple(new_index[index] for index in stack.deep_layers)
    return copied


class StandInCheckpointer(CheckpointStore):
    """Checkpointer that fills models with random weights and saves nothing."""

    def __init__(self) -> None:
        super().__init__({})
        self.checkpoint_dir = Path()

    def add_source(self, name: str, source: Any) -> None:
        """Accept any source."""

    def source(self, name: str = "policy") -> Any:
        """Return a source without files; its fingerprint is the name."""
        return SimpleNamespace(checkpoint_dir=self.checkpoint_dir, fingerprint=name)

    def load_model(
        self, model: nn.Module, *, device: Any = "cpu", dtype: torch.dtype | None = None, name: str = "policy"
    ) -> None:
        """Materialize every parameter on the meta device, in the form in which conversions store it."""
        if text_decoder(model) is not model:
            if not isinstance(model, ImageTextModel) or model.image_blocks:
                raise UserError(f"model: a {type(model).__name__} with images cannot be simulated: use --dry-run.")
            _image_description.set(model.description)
        _before_load.get()()
        for weight, parameter in list(model.named_parameters()):
            stored_dtype = None  # as it is, of quantized weights
            if parameter.is_floating_point():
                stored_dtype = dtype
            torch.nn.init.zeros_(materialize(model, weight, torch.device("cpu"), stored_dtype))
        model.adapter_init = None
        _on_load.get()(model)

    def check_model(self, model: nn.Module, *, name: str = "policy") -> None:
        """Do nothing: there are no files."""

    def check_contents(self, models: Any, **_: Any) -> None:
        """Do nothing: with some layers omitted, names differ from the whole model's."""

    def check_output_dir(self, *, resume: bool) -> None:
        """Do nothing: nothing is written."""

    def lock_output_dir(self) -> None:
        """Do nothing: nothing is written."""

    def find_resume_point(self, cfg: Any = None) -> None:
        """Return None: there is no checkpoint."""

    def save(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def save_quantized(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class StandInTokenizer:
    """Tokenizer that only has a row length."""

    vocab_size = 0  # fits every embedding
    pad_id = bos_id = eos_id = 0

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.stop_tokens = [0]
        self.special_tokens: dict[str, int] = {}


_COLUMNS = {
    "texts": ("tokens", "labels"),
    "answers": ("tokens", "labels"),
    "pairs": ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"),
    "retrieval": ("query", "positive"),
    "documents": (),
    "candidates": (),
}


class StandInDataset(ExampleDataset):
    """Dataset of rows of equal length, with a label for every token.

    If the model has image tokens, half of the tokens of a row are image tokens.

    Args:
        tokenizer: ignored.
        rows: number of rows.
        length: tokens per row.
        kind: format of a row: a text, or the ``trains_on`` of a preference loss.
    """

    def __init__(self, tokenizer: Any, *, rows: int, length: int, kind: str) -> None:
        self._rows = rows
        self._kind = kind
        self._length = length
        self._row = dict.fromkeys(_COLUMNS[kind], [0] * length)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = _Row(self._row)
        description = _image_description.get()
        if description is not None:
            image = {"images": _image(self._length, description)}
            for column in self._row:
                # A column of tokens has its images beside it: chosen_input_ids, chosen_encoder_input.
                name = column.replace("input_ids", "tokens")
                if "tokens" in name:
                    row[name.replace("tokens", "encoder_input")] = image
        if self._kind == "answers":
            row["is_chosen"] = index % 2 == 0  # the loss compares good answers with bad ones
        if self._kind == "retrieval":
            row |= {"negatives": [], "labels": [0]}
        document = [0] * self._length
        if self._kind == "documents":
            row |= {"documents": [document], "targets": [1.0], "labels": [0]}
        if self._kind == "candidates":  # two documents are the fewest that can be ranked
            row |= {"documents": [document, document], "targets": [1.0, 0.0], "labels": [0]}
        return row


def _image(length: int, description: Any) -> Images:
    """Return an image that has half of the tokens of a row."""
    merge = description.vision.merge  # patches of a token along each side
    count = max(length // 2, 1)
    patches = torch.zeros(count * merge**2, description.vision.patch_values)
    positions = None
    if description.rope_axes:  # of time, height and width
        positions = torch.arange(length).expand(3, 1, length)  # [3, 1, s]
    return Images(patches, ((1, merge, merge * count),), torch.arange(count), positions)


class _Row(dict[str, Any]):
    """Row that raises if a collate function reads a missing column."""

    def __missing__(self, name: str) -> Any:
        raise SimulationError(
            f"collate_fn: it reads '{name}', but rows of a simulated run only have {', '.join(self)}: use --dry-run."
        )
