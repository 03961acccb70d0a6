"""Checkpointers for configs and copied recipes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._adapter import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_DIR,
    ADAPTER_FILE,
    adapted_modules,
    adapter_settings,
)
from torchtune.checkpoints._checkpoint_store import POLICY, CheckpointStore
from torchtune.checkpoints._directories import complete_directories, new_directory, prune
from torchtune.checkpoints._export import write_entries
from torchtune.checkpoints._load import ModelType, detect_format
from torchtune.checkpoints._save import Entry, save_tensors
from torchtune.checkpoints._state import STATE_DIR
from torchtune.checkpoints._weight_files import (
    CheckpointError,
    open_source,
    read_json,
    resolve_files,
    safe_torch_load,
    stream,
)
from torchtune.models import (
    Description,
    FusedAdapter,
    ModelSpec,
    get_spec,
    list_specs,
    spec_for_architecture,
    text_config,
)
from torchtune.models.convert_weights import meta_to_tune, tune_to_meta, tune_to_peft_adapter_config
from torchtune.utils import atomic_write, get_logger, write_json

# Keys of the state dicts, as spelled in copied recipes.
ADAPTER_CONFIG = "adapter_config"
ADAPTER_KEY = "adapter"
DATALOADER_KEY = "dataloader"
EPOCHS_KEY = "epochs_run"
MAX_STEPS_KEY = "max_steps_per_epoch"
MODEL_KEY = "model"
OPT_KEY = "optimizer"
RNG_KEY = "rng_state"
SEED_KEY = "seed"
STEPS_KEY = "steps_run"
TOTAL_EPOCHS_KEY = "total_epochs"
VAL_DATALOADER_KEY = "val_dataloader"

_RECIPE_STATE = "recipe_state.pt"
_ADAPTER_PT = "adapter_model.pt"
_MODEL_BIN = "model-00001-of-00001.bin"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class LegacyInterface(CheckpointStore):
    """A :class:`CheckpointStore` with ``load_checkpoint`` and ``save_checkpoint`` for full state dicts.

    Base class of the checkpointers, which define ``should_load_recipe_state``.
    """

    should_load_recipe_state: bool

    # Format of weight names in saved files, and in loaded folders without config.json.
    _legacy_names = "hf"

    def load_checkpoint(self, weights_only: bool = True) -> dict[str, Any]:
        """Read ``checkpoint_dir`` into ``{"model": {parameter name: tensor}}``.

        With ``should_load_recipe_state``, load the newest checkpoint in ``output_dir`` instead, including its adapter
        and the contents of its ``recipe_state.pt``.

        Args:
            weights_only: accepted for older recipes; pickled code is never run.

        Raises:
            CheckpointError: files are missing or corrupt, or the folder does not describe the model.
        """
        if not self.should_load_recipe_state:
            return {MODEL_KEY: self._read_model(self._weight_files())}
        latest = self._latest()
        adapter = latest / _ADAPTER_PT
        loaded: dict[str, Any] = {}
        if adapter.is_file():
            loaded[MODEL_KEY] = self._read_model(self._weight_files())
            loaded[ADAPTER_KEY] = safe_torch_load(adapter)
        else:
            loaded[MODEL_KEY] = self._read_model(resolve_files(latest, None))
        return loaded | safe_torch_load(self._recipe_state(latest), mmap=False)

    def _weight_files(self) -> list[Path]:
        return resolve_files(self.source().checkpoint_dir, self.source().checkpoint_files)

    def _read_model(self, paths: list[Path]) -> dict[str, torch.Tensor]:
        source = open_source(paths)
        if self._legacy_names == "tune":
            return dict(stream(source))
        if self._legacy_names == "meta":
            converted = meta_to_tune(dict(stream(source)))
            if self.source().model_type is ModelType.LLAMA3_2:
                converted.pop("output.weight", None)  # tied to the embedding
            return converted
        spec, description = self._identity()
        kind = detect_format(source, spec, description)
        if kind == "tune":
            return dict(stream(source))
        return dict(spec.weight_map(kind).to_tune(stream(source), description))

    def save_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
        *,
        step: int | None = None,
        max_shard_size: str = "5GB",
        dir_prefix: str = "epoch",
    ) -> None:
        """Write ``epoch_N`` (or ``step_N``) from a state dict.

        Args:
            state_dict: ``model`` (with this library's names), optionally ``adapter`` and ``adapter_config``, and any
                other value that ``torch.load(weights_only=True)`` can read.
            epoch: N.
            intermediate_checkpoint: also write all other values as ``recipe_state.pt``.
            adapter_only: do not write the model.
            step: N if ``dir_prefix`` is ``"step"``.
            max_shard_size: maximum size of a file, for example ``"5GB"``.
            dir_prefix: ``"epoch"`` or ``"step"``.

        Raises:
            CheckpointError: ``adapter_only`` without an adapter, or the folder does not describe the model.
            UserError: the disk is full; earlier checkpoints are unchanged.
        """
        if adapter_only and ADAPTER_KEY not in state_dict:
            raise CheckpointError("save_checkpoint: adapter_only=True needs an adapter in the dict.")
        number = step if dir_prefix == "step" and step is not None else epoch
        limit = _bytes(max_shard_size)
        with self.lock.held(), new_directory(self.require_output_dir(), f"{dir_prefix}_{number}") as folder:
            if not adapter_only:
                self._write_model(state_dict[MODEL_KEY], folder, limit)
            if ADAPTER_KEY in state_dict:
                self._write_adapter(state_dict, folder, beside_model=not adapter_only)
            if (self.source().checkpoint_dir / "config.json").is_file():
                write_json(folder / "config.json", text_config(read_json(self.source().checkpoint_dir / "config.json")))
            self.source().carry_files(folder)
            if intermediate_checkpoint:
                rest = {k: v for k, v in state_dict.items() if k not in (MODEL_KEY, ADAPTER_KEY, ADAPTER_CONFIG)}
                _torch_save(rest, folder / _RECIPE_STATE)
        prune(self.require_output_dir(), self.keep_last_n_checkpoints)

    def _write_model(self, model: Mapping[str, torch.Tensor], folder: Path, limit: int) -> None:
        if self._legacy_names == "tune":
            _torch_save(_on_cpu(model.items()), folder / _MODEL_BIN)
        elif self._legacy_names == "meta":
            theirs = tune_to_meta(dict(model))
            theirs.setdefault("output.weight", theirs["tok_embeddings.weight"])
            _torch_save(_on_cpu(theirs.items()), folder / _MODEL_BIN)
        else:
            spec, description = self._identity()
            tensors = spec.weight_map("hf").to_external(model.items(), description)
            write_entries([Entry.of(*item) for item in tensors], folder, limit)

    def _write_adapter(self, state_dict: Mapping[str, Any], folder: Path, *, beside_model: bool) -> None:
        """Write the adapter with this library's names, and in PEFT's layout if the folder describes the model.

        For a merged model, PEFT's files go into ``adapter/``: transformers would apply an adapter next to the weights a
        second time.
        """
        adapter = _on_cpu(state_dict[ADAPTER_KEY].items())
        _torch_save(adapter, folder / _ADAPTER_PT)
        if self._legacy_names != "hf":
            return
        spec, description = self._identity()
        weight_map = spec.weight_map("hf").peft()
        fused = {n for g in weight_map.groups(description) if isinstance(g.op, FusedAdapter) for n in g.tune}
        if fused & adapter.keys():
            get_logger().warning(
                f"{folder.name} holds the adapter as {_ADAPTER_PT} alone: only the checkpointer's save() knows PEFT's "
                f"settings for adapters of fused projections ({spec.name})."
            )
            return
        target = folder / ADAPTER_DIR if beside_model else folder
        target.mkdir(exist_ok=True)
        save_tensors(
            dict(weight_map.to_external(adapter.items(), description, partial=True)),
            target / ADAPTER_FILE,
        )
        if ADAPTER_CONFIG in state_dict:
            settings = tune_to_peft_adapter_config(dict(state_dict[ADAPTER_CONFIG]))
            groups = [group for group in weight_map.groups(description) if adapter.keys() & group.tune]
            settings |= adapted_modules(groups, spec.weight_map("hf"), description, settings)
            write_json(target / ADAPTER_CONFIG_FILE, adapter_settings(self.source().base_name(), settings))

    def _latest(self) -> Path:
        """Return the newest complete checkpoint; for earlier releases, the one with the largest number."""
        output_dir = self.require_output_dir()
        complete = complete_directories(output_dir)
        names = [get_largest_iter_folder(output_dir, rf"^{kind}_(\d+)$") for kind in ("step", "epoch")]
        found = complete or [output_dir / name for name in names if name is not None]
        if found and (found[-1] / STATE_DIR).is_dir():
            raise CheckpointError(
                f"{found[-1]} was saved by the checkpointer's save(), without a {_RECIPE_STATE}: resume it with "
                "enable_async_checkpointing=True, or delete that folder."
            )
        with_state = [path for path in found if self._recipe_state(path).is_file()]
        if not with_state:
            raise CheckpointError(f"{output_dir} holds no checkpoint with a {_RECIPE_STATE} to resume from.")
        return with_state[-1]

    @staticmethod
    def _recipe_state(folder: Path) -> Path:
        inside = folder / _RECIPE_STATE
        return inside if inside.is_file() else folder.parent / "recipe_state" / _RECIPE_STATE

    def _identity(self) -> tuple[ModelSpec, Description]:
        """Return spec and description from ``config.json``; a ``model_type`` that names a family overrides it."""
        path = self.source().checkpoint_dir / "config.json"
        if not path.is_file():
            raise CheckpointError(f"There is no {path}: load_checkpoint and save_checkpoint need it to know the model.")
        config = text_config(read_json(path))
        named = None if self.source().model_type is None else self.source().model_type.value
        if named in list_specs():
            spec = get_spec(named)
        elif config.get("architectures"):
            spec = spec_for_architecture(config["architectures"][0])
        else:
            raise CheckpointError(f"{path} names no architecture: name the family of the model as model_type.")
        return spec, spec.from_hf_config(config)


def get_largest_iter_folder(dir: str | Path, pattern: str = r"^epoch_(\d+)") -> str | None:
    """Return the name of the folder in ``dir`` with the largest number; None if there is none.

    Args:
        dir: folder to search.
        pattern: regular expression with one group, the number.
    """
    path = Path(dir)
    if not path.is_dir():
        return None
    found = [(int(match[1]), entry.name) for entry in path.iterdir() if (match := re.match(pattern, entry.name))]
    return max(found)[1] if found else None


def update_state_dict_for_classifier(
    state_dict: dict[str, torch.Tensor],
    model_named_parameters: Iterable[tuple[str, nn.Parameter]],
    force_override: bool = False,
) -> None:
    """Replace the output layer of ``state_dict`` by a classifier's, in place.

    If the shape of the output projection differs from the model's, the model's (newly initialized) projection replaces
    it. An output bias is removed unless the model has one.

    Args:
        state_dict: state dict of the checkpoint, with this library's names.
        model_named_parameters: named parameters of the model to load.
        force_override: replace the projection even if the shapes match.

    Raises:
        CheckpointError: the model has no ``output.weight``.
    """
    parameters = dict(model_named_parameters)
    if "output.weight" not in parameters:
        raise CheckpointError("The model has no output.weight, so it is no classifier: use a classifier's builder.")
    ours = parameters["output.weight"]
    theirs = state_dict.get("output.weight")
    if force_override or theirs is None or theirs.shape != ours.shape:
        state_dict["output.weight"] = ours
    if "output.bias" in state_dict and "output.bias" not in parameters:
        del state_dict["output.bias"]


def _bytes(size: str) -> int:
    for unit, factor in _UNITS.items():
        number = size.upper().removesuffix(unit)
        if number != size.upper() and number.strip().replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise CheckpointError(f"max_shard_size: '{size}' is no size, write it like 5GB.")


def _on_cpu(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors}


def _torch_save(value: Any, path: Path) -> None:
    with atomic_write(path) as file:
        torch.save(value, file)


class FullModelHFCheckpointer(LegacyInterface):
    """A :class:`CheckpointStore` of one model, with the arguments of configs.

    Hugging Face libraries can load its checkpoints. A recipe adds further models with :meth:`add_source`.

    Args:
        checkpoint_dir: folder of the weights, usually as downloaded; see :class:`ModelSource` for the formats.
        checkpoint_files: names of the weight files, or ``{filename_format, max_filename}``; found by default.
        model_type: name of a :class:`ModelType`; it must match the model.
        output_dir: folder of the checkpoints ``epoch_N`` and ``step_N``.
        adapter_checkpoint: initial adapter: a folder in PEFT's layout, a file in such a folder, or the
            ``adapter_model.pt`` of an older checkpoint; an absolute path, or relative to the working directory,
            ``checkpoint_dir`` or ``output_dir``.
        recipe_checkpoint: accepted for older configs; a resume finds the newest complete checkpoint.
        resume_from_checkpoint: accepted for older configs; the recipe's setting of the same name applies.
        safe_serialization: accepted for older configs; files are always safetensors.
        should_load_recipe_state: whether :meth:`load_checkpoint` reads the newest checkpoint in ``output_dir``.
        keep_last_n_checkpoints: number of checkpoints to keep. By default all ``epoch_N`` are kept, and the last three
            ``step_N``.
        enable_dcp: accepted for older configs; every rank always reads and writes its own shard.
        text_only: export the text decoder of a multimodal checkpoint as a separate model. By default the other towers
            are exported with it, unchanged.

    Raises:
        CheckpointError: ``model_type`` or ``keep_last_n_checkpoints`` is invalid.

    Example:
        >>> checkpointer = torchtune.training.FullModelHFCheckpointer(str(checkpoint), output_dir=str(folder / "run"))
        >>> checkpointer.load_model(model)
        >>> path = checkpointer.save("epoch_0", model)
        >>> checkpointer.close()
    """

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        adapter_checkpoint: str | None = None,
        recipe_checkpoint: str | None = None,
        resume_from_checkpoint: bool = False,
        safe_serialization: bool = True,
        should_load_recipe_state: bool = False,
        *,
        keep_last_n_checkpoints: int | None = None,
        enable_dcp: bool = False,
        text_only: bool = False,
    ) -> None:
        source = {
            "checkpoint_dir": checkpoint_dir,
            "checkpoint_files": checkpoint_files,
            "adapter_checkpoint": adapter_checkpoint,
            "model_type": model_type,
            "text_only": text_only,
        }
        super().__init__({POLICY: source}, output_dir, keep_last_n_checkpoints=keep_last_n_checkpoints)
        self.should_load_recipe_state = should_load_recipe_state

    @property
    def store(self) -> CheckpointStore:
        """This object, as the store of all models."""
        return self

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the policy's weights."""
        return self.source().checkpoint_dir


class FullModelMetaCheckpointer(FullModelHFCheckpointer):
    """A :class:`FullModelHFCheckpointer` for Meta's consolidated files, kept for configs that name it.

    :meth:`save` writes Hugging Face's format; :meth:`save_checkpoint` writes one file with Meta's names.
    See :class:`FullModelHFCheckpointer` for the arguments.

    Example:
        >>> checkpointer = torchtune.training.FullModelMetaCheckpointer(
        ...     "/tmp/Llama-3.1-8B", ["consolidated.00.pth"], model_type="LLAMA3", output_dir="/tmp/run"
        ... )  # doctest: +SKIP
    """

    _legacy_names = "meta"

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        adapter_checkpoint: str | None = None,
        recipe_checkpoint: str | None = None,
        resume_from_checkpoint: bool = False,
        should_load_recipe_state: bool = False,
        *,
        keep_last_n_checkpoints: int | None = None,
    ) -> None:
        super().__init__(
            checkpoint_dir,
            checkpoint_files,
            model_type,
            output_dir,
            adapter_checkpoint,
            recipe_checkpoint,
            resume_from_checkpoint,
            should_load_recipe_state=should_load_recipe_state,
            keep_last_n_checkpoints=keep_last_n_checkpoints,
        )


class FullModelTorchTuneCheckpointer(FullModelMetaCheckpointer):
    """A :class:`FullModelHFCheckpointer` for files with this library's names.

    :meth:`save` writes Hugging Face's format; :meth:`save_checkpoint` writes one file with this library's names.
    See :class:`FullModelHFCheckpointer` for the arguments.

    Example:
        >>> checkpointer = torchtune.training.FullModelTorchTuneCheckpointer(
        ...     "/tmp/run/epoch_0", ["model.pt"], model_type="LLAMA3", output_dir="/tmp/next"
        ... )  # doctest: +SKIP
    """

    _legacy_names = "tune"


Checkpointer = FullModelHFCheckpointer | FullModelMetaCheckpointer | FullModelTorchTuneCheckpointer
