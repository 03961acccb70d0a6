"""Full state dicts: ``load_checkpoint`` and ``save_checkpoint``, the interface of copied recipes of earlier releases.

The checkpointers of configs have it besides the methods of :class:`CheckpointStore`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from torchtune.checkpoints._adapter import ADAPTER_DIR, ADAPTER_FILE
from torchtune.checkpoints._adapter_settings import ADAPTER_CONFIG_FILE, adapted_modules, adapter_settings
from torchtune.checkpoints._directories import STATE_DIR, complete_directories, new_directory, prune
from torchtune.checkpoints._export import write_tensors
from torchtune.checkpoints._load import ModelType, detect_format
from torchtune.checkpoints._save import ExistingTensor, save_tensors
from torchtune.checkpoints._weight_files import (
    CheckpointError,
    WeightFiles,
    find_files,
    open_weight_files,
    read_json,
    safe_torch_load,
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

# Keys of state dicts, as spelled in copied recipes.
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

# Format of weight names: Hugging Face's, Meta's, or this library's.
NameFormat = Literal["hf", "meta", "tune"]


def _recipe_state(folder: Path) -> Path:
    """Return the file of a recipe's state: in the checkpoint, or in the folder that older releases have beside it."""
    path = folder / _RECIPE_STATE
    if path.is_file():
        return path
    return folder.parent / "recipe_state" / _RECIPE_STATE


class StateDictMethods:
    """``load_checkpoint`` and ``save_checkpoint`` of a :class:`CheckpointStore` of one model, the policy.

    Recipes of this library call neither: :meth:`CheckpointStore.load_model` and :meth:`CheckpointStore.save` stream
    weights between files and shards, without a full state dict.

    Attributes:
        should_load_recipe_state: whether :meth:`load_checkpoint` reads the newest checkpoint in ``output_dir``.
    """

    # Format of weight names for load_checkpoint and save_checkpoint.
    _name_format: ClassVar[NameFormat]
    should_load_recipe_state: bool

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the policy's weights."""
        return self.source().checkpoint_dir

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
            return {MODEL_KEY: self._read_model(self.source().open())}
        newest = self._newest_with_state()
        adapter = newest / _ADAPTER_PT
        state_dicts: dict[str, Any] = {}
        if adapter.is_file():
            # The base weights of the source: those beside the adapter have it merged in, if there are any.
            state_dicts[MODEL_KEY] = self._read_model(self.source().open())
            state_dicts[ADAPTER_KEY] = safe_torch_load(adapter)
        else:
            state_dicts[MODEL_KEY] = self._read_model(open_weight_files(find_files(newest)))
        return state_dicts | safe_torch_load(_recipe_state(newest), mmap=False)

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
        number = epoch
        if dir_prefix == "step" and step is not None:
            number = step
        max_shard_bytes = _parse_size(max_shard_size)
        if adapter_only and ADAPTER_KEY not in state_dict:
            raise CheckpointError("save_checkpoint: adapter_only=True needs an adapter in the dict.")
        if self.upload is not None:
            raise CheckpointError(
                "checkpointer.upload: save_checkpoint does not upload: save with checkpointer.save, as the recipes of "
                "this release do, or leave the setting out."
            )
        output_dir = self.require_output_dir()
        with self.lock.held(), new_directory(output_dir, f"{dir_prefix}_{number}") as folder:
            if not adapter_only:
                self._write_model(state_dict[MODEL_KEY], folder, max_shard_bytes)
            if ADAPTER_KEY in state_dict:
                self._write_adapter(state_dict, folder, beside_model=not adapter_only)
            source = self.source()
            source_config = source.checkpoint_dir / "config.json"
            if source_config.is_file():  # of a composite model, only the text model is in a state dict
                write_json(folder / "config.json", text_config(read_json(source_config)))
            source.carry_files(folder)
            if intermediate_checkpoint:
                weights = (MODEL_KEY, ADAPTER_KEY, ADAPTER_CONFIG)
                recipe_state = {key: value for key, value in state_dict.items() if key not in weights}
                _torch_save(recipe_state, folder / _RECIPE_STATE)
        prune(output_dir, self.keep_last_n_checkpoints)

    def _read_model(self, files: WeightFiles) -> dict[str, torch.Tensor]:
        """Read weight files into a state dict with this library's names."""
        if self._name_format == "tune":
            return dict(files.stream())
        if self._name_format == "meta":
            state_dict = meta_to_tune(dict(files.stream()))
            if self.source().model_type is ModelType.LLAMA3_2:
                state_dict.pop("output.weight", None)  # tied to the embedding
            return state_dict
        spec, description = self._spec_and_description()
        name_format = detect_format(files, spec, description)
        if name_format == "tune":
            return dict(files.stream())
        return dict(spec.weight_map(name_format).to_tune(files.stream(), description))

    def _write_model(self, state_dict: Mapping[str, torch.Tensor], folder: Path, max_shard_bytes: int) -> None:
        if self._name_format == "tune":
            _torch_save(_on_cpu(state_dict), folder / _MODEL_BIN)
        elif self._name_format == "meta":
            meta_state_dict = tune_to_meta(dict(state_dict))
            # Meta's files also have the output of models that tie it.
            meta_state_dict.setdefault("output.weight", meta_state_dict["tok_embeddings.weight"])
            _torch_save(_on_cpu(meta_state_dict), folder / _MODEL_BIN)
        else:
            spec, description = self._spec_and_description()
            tensors = spec.weight_map("hf").to_external(state_dict.items(), description)
            write_tensors([ExistingTensor(name, tensor) for name, tensor in tensors], folder, max_shard_bytes)

    def _write_adapter(self, state_dict: Mapping[str, Any], folder: Path, *, beside_model: bool) -> None:
        """Write the adapter with this library's names, and in PEFT's layout if the folder describes the model.

        For a merged model, PEFT's files go into ``adapter/``: transformers would apply an adapter next to the weights a
        second time.
        """
        adapter = _on_cpu(state_dict[ADAPTER_KEY])
        _torch_save(adapter, folder / _ADAPTER_PT)  # load_checkpoint reads this file
        if self._name_format != "hf":
            return  # folders in other formats need not have a config.json, which the layout needs
        spec, description = self._spec_and_description()
        weight_map = spec.weight_map("hf").peft()
        groups = [group for group in weight_map.groups(description) if adapter.keys() & group.tune]
        if any(isinstance(group.op, FusedAdapter) for group in groups):
            get_logger().warning(
                f"{folder.name} holds the adapter as {_ADAPTER_PT} alone: only the checkpointer's save() knows PEFT's "
                f"settings for adapters of fused projections ({spec.name})."
            )
            return
        adapter_dir = folder
        if beside_model:
            adapter_dir = folder / ADAPTER_DIR
            adapter_dir.mkdir(exist_ok=True)
        tensors = dict(weight_map.to_external(adapter.items(), description, partial=True))
        save_tensors(tensors, adapter_dir / ADAPTER_FILE)
        if ADAPTER_CONFIG in state_dict:  # without it, rank and alpha are not known
            settings = tune_to_peft_adapter_config(dict(state_dict[ADAPTER_CONFIG]))
            settings |= adapted_modules(groups, spec.weight_map("hf"), description, settings)
            write_json(adapter_dir / ADAPTER_CONFIG_FILE, adapter_settings(self.source().base_name(), settings))

    def _newest_with_state(self) -> Path:
        """Return the newest checkpoint with a recipe's state.

        Checkpoints of older releases have no completion marker: if none is complete, the largest number decides.
        """
        output_dir = self.require_output_dir()
        checkpoints = complete_directories(output_dir)
        if not checkpoints:
            for kind in ("step", "epoch"):  # in this order: an epoch ends after its steps
                name = get_largest_iter_folder(output_dir, rf"^{kind}_(\d+)$")
                if name is not None:
                    checkpoints.append(output_dir / name)
        # Not skipped: an older checkpoint would silently repeat the training since.
        if checkpoints and (checkpoints[-1] / STATE_DIR).is_dir():
            raise CheckpointError(
                f"{checkpoints[-1]} was saved by the checkpointer's save(), without a {_RECIPE_STATE}: resume it with "
                "enable_async_checkpointing=True, or delete that folder."
            )
        with_state = [path for path in checkpoints if _recipe_state(path).is_file()]
        if not with_state:
            raise CheckpointError(f"{output_dir} holds no checkpoint with a {_RECIPE_STATE} to resume from.")
        return with_state[-1]

    def _spec_and_description(self) -> tuple[ModelSpec, Description]:
        """Return spec and description from ``config.json``; a ``model_type`` that names a family overrides it."""
        path = self.source().checkpoint_dir / "config.json"
        if not path.is_file():
            raise CheckpointError(f"There is no {path}: load_checkpoint and save_checkpoint need it to know the model.")
        config = text_config(read_json(path))
        model_type = self.source().model_type
        if model_type is not None and model_type.value in list_specs():
            spec = get_spec(model_type.value)
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
    numbered = []
    for folder in path.iterdir():
        match = re.match(pattern, folder.name)
        if match:
            numbered.append((int(match[1]), folder.name))
    if not numbered:
        return None
    _, name = max(numbered)
    return name


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
        raise CheckpointError("The model has no output.weight, so it is not a classifier: use a classifier's builder.")
    new_head = parameters["output.weight"]
    head = state_dict.get("output.weight")
    if force_override or head is None or head.shape != new_head.shape:
        state_dict["output.weight"] = new_head
    if "output.bias" in state_dict and "output.bias" not in parameters:
        del state_dict["output.bias"]


def _parse_size(size: str) -> int:
    """Return the bytes of a size such as ``"5GB"``. Raises ``CheckpointError`` if it is written otherwise."""
    for unit, factor in _UNITS.items():
        if not size.upper().endswith(unit):
            continue
        number = size.upper().removesuffix(unit)
        if number.strip().replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise CheckpointError(f"max_shard_size: '{size}' is not a size: write it like 5GB.")


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _torch_save(value: Any, path: Path) -> None:
    with atomic_write(path) as file:
        torch.save(value, file)
