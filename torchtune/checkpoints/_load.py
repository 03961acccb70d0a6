"""Load the weights of a model from its source: a folder, its files and its adapter."""

import logging
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.checkpoints._adapter import (
    adapter_beside_base,
    add_new_tokens,
    find_adapter,
    load_adapter,
    startable,
    wanted_start,
)
from torchtune.checkpoints._directories import MARKER
from torchtune.checkpoints._gguf import GGUFFile, special_ids, tokenizer_files
from torchtune.checkpoints._model_weights import ModelWeights, check_shape, identity, materialize, replaced_parameters
from torchtune.checkpoints._weight_files import (
    CheckpointError,
    Source,
    TextTower,
    open_source,
    read_json,
    resolve_files,
)
from torchtune.models import (
    Description,
    Group,
    Identity,
    ModelError,
    ModelSpec,
    WeightMap,
    WeightMapError,
    get_spec,
    spec_for_architecture,
    text_config,
)
from torchtune.modules.peft import LoRALinear
from torchtune.tokenizers import is_tokenizer_file
from torchtune.training.parallel import full_tensor, my_shard
from torchtune.utils import get_logger, log_once, log_rank_zero, refuse_foreign, sign_of_life, write_json


class ModelType(Enum):
    """Allowed values of ``model_type:``, which must match the spec of the model.

    Example:
        >>> torchtune.training.ModelType["QWEN3"].name
        'QWEN3'
    """

    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    LLAMA2 = "llama2"
    LLAMA3 = "llama3"
    LLAMA3_2 = "llama3_2"
    LLAMA3_VISION = "llama3_vision"
    LLAMA4 = "llama4"
    MISTRAL = "mistral"
    PHI3_MINI = "phi3_mini"
    PHI4 = "phi4"
    REWARD = "reward"
    QWEN2 = "qwen2"
    CLIP_TEXT = "clip_text"
    T5_ENCODER = "t5_encoder"
    QWEN3 = "qwen3"


# Fields that the shapes of tensors do not determine.
_UNSEEN = ("rope_base", "rope_scaling", "norm_eps", "activation", "chunk")


def detect_format(source: Source, spec: ModelSpec, description: Description) -> str:
    """Return the format of a source's tensor names: a key of ``spec.weight_maps``, or ``"tune"`` for this library's.

    Raises:
        CheckpointError: the format is unknown for this family.
    """
    if source.kind is not None:
        return source.kind
    names, matches = set(source.names()), {}
    for kind, weight_map in spec.weight_maps.items():
        groups = weight_map.groups(description)
        matches[kind] = len(names.intersection(name for group in groups for name in group.external))
        own = len(names.intersection(name for group in groups for name in group.tune))
        matches["tune"] = max(own, matches.get("tune", 0))
    best = max(matches, key=matches.__getitem__, default=None)
    if not names or best is None or matches[best] == 0:
        example = f"its first tensor is '{source.names()[0]}'" if names else "it holds no tensor"
        raise CheckpointError(
            f"{_folder(source)}: no tensor belongs to a model of the family '{spec.name}' ({example}): "
            "check checkpoint_dir and checkpoint_files against the model in the config."
        )
    return best


def _folder(source: Source) -> Path | str:
    if not (names := source.names()):
        return "checkpoint_files"
    first = source.where(names[0])
    return first if source.kind == "gguf" else first.parent


def load_base(
    weights: ModelWeights,
    source: Source,
    device: torch.device,
    dtype: torch.dtype | None = None,
    starts: Mapping[str, LoRALinear] | None = None,
) -> set[str]:
    """Fill the base weights of a model from a source, one tensor at a time; every rank reads its own shard.

    Args:
        weights: the model's weights.
        source: weights in any format of the model's spec.
        device: device for parameters on the meta device.
        dtype: dtype for parameters on the meta device; unchanged by default.
        starts: adapted layers with weights that are split into the initial adapter and the rest, by name of the weight.

    Returns:
        Names of base weights to initialize: the output layer of a classifier, if the source is a language model.

    Raises:
        CheckpointError: names or shapes do not fit; the message names file, tensor and shapes.
    """
    filled: set[str] = set()
    weights.starts = dict(starts or {})
    for group, shapes in _groups(weights, source, compare_tied=True):
        for name in group.tune:
            read = partial(group.read, name, shapes=shapes, source=source.read)
            weights.fill(name, read, device, dtype)
            sign_of_life()
        filled.update(group.tune)
    new_head = weights.base & {_HEAD} - filled
    if new_head:
        log_rank_zero(get_logger(), f"{_folder(source)} is of a language model: the classifier's output layer is new.")
    return new_head


def check_base(weights: ModelWeights, source: Source) -> None:
    """Check that a source has the names and shapes that :func:`load_base` needs, without reading tensor data.

    Args:
        weights: the model's weights, on the meta device, not sharded.
        source: see :func:`load_base`.

    Raises:
        CheckpointError: see :func:`load_base`.
    """
    for _ in _groups(weights, source, compare_tied=False):
        pass


def _groups(
    weights: ModelWeights, source: Source, *, compare_tied: bool
) -> Iterator[tuple[Group, list[tuple[int, ...]]]]:
    """Yield the groups of tensors to read, in file order, with the shapes of their external tensors.

    Args:
        weights: the model's weights.
        source: see :func:`load_base`.
        compare_tied: also read and compare tensors that the model ties and the source stores twice.
    """
    weights.check_names()
    spec, description = weights.identity
    kind = detect_format(source, spec, description)
    if kind == "tune":
        groups = _own_groups(weights, source, description)
    else:
        weight_map = spec.weight_map(kind)
        if compare_tied:
            _check_tied(weights, weight_map, description, source)
        names, lacks_head = source.names(), _lacks_head(weight_map, description, source)
        if lacks_head and not weights.parameters[_HEAD].requires_grad:
            raise CheckpointError(
                f"{_folder(source)} is of a language model: the classifier's output layer would be new and, under an "
                "adapter, never trained: train all weights, without adapters, or start from a classifier's checkpoint."
            )
        if lacks_head:  # a classifier has no projection to the vocabulary
            names = [name for name in names if name not in _head(weight_map, replace(description, num_classes=0))]
        try:
            groups = weight_map.select(names, description, lambda name: name != _HEAD or not lacks_head)
        except WeightMapError as error:
            raise CheckpointError(f"{_folder(source)}: {str(error).rstrip('.')}: {_OTHER_MODEL}.") from error
    for group in groups:
        shapes = [source.shape(name) for name in group.external]
        group = group.for_shapes(shapes)
        specs = group.to_external([weights.specs[name] for name in group.tune])
        for name, shape, wanted in zip(group.external, shapes, specs, strict=True):
            check_shape(source.where(name), name, shape, wanted.shape)
        yield group, shapes


_HEAD = "output.weight"
_OTHER_MODEL = "check checkpoint_dir and checkpoint_files against the model in the config"


def _head(weight_map: WeightMap, description: Description) -> set[str]:
    """Return the external names of the output layer."""
    groups = weight_map.groups(description)
    return {name for group in groups if _HEAD in group.tune for name in group.external}


def _lacks_head(weight_map: WeightMap, description: Description, source: Source) -> bool:
    """Return whether the model is a classifier and the source a language model."""
    return description.is_classifier and not _head(weight_map, description) & set(source.names())


def _own_groups(weights: ModelWeights, source: Source, description: Description) -> list[Group]:
    """Return one group per base weight of a source with this library's names."""
    names = set(source.names())
    for name in sorted(weights.base - names):
        raise CheckpointError(f"{_folder(source)} lacks the tensor '{name}', which the model needs: {_OTHER_MODEL}.")
    for name in sorted(names - weights.base - weights.owned):
        raise CheckpointError(f"{source.where(name)}: the tensor '{name}' has no place in the model: {_OTHER_MODEL}.")
    return [Group((n,), (n,), Identity(), description) for n in source.names() if n in weights.base]


def _check_tied(weights: ModelWeights, weight_map: WeightMap, description: Description, source: Source) -> None:
    """Raise if the source stores a tied tensor twice with different values; every rank compares its own shard."""
    names = set(source.names())
    originals = {name: group.external[0] for group in weight_map.groups(description) for name in group.tune}
    for tie in weight_map.tied:
        original = originals[tie.source]
        if not getattr(description, tie.when) or tie.external not in names or original not in names:
            continue
        parameter, shapes = weights.parameters[tie.source], {source.shape(tie.external), source.shape(original)}
        slices, local = my_shard(parameter)
        differs = shapes == {tuple(parameter.shape)} and local.numel() > 0
        if differs:
            differs = not torch.equal(source.read(tie.external, slices), source.read(original, slices))
        if differs or len(shapes) > 1:
            raise CheckpointError(
                f"{source.where(tie.external)}: '{tie.external}' differs from '{original}', but the model "
                "shares them: build it with tie_word_embeddings=False."
            )


def check_config(model: nn.Module, config_file: Path) -> None:
    """Check a checkpoint's ``config.json`` against the model, including fields that shapes do not determine.

    Raises:
        CheckpointError: the family has other weight names or another layout, or the numbers of heads differ.
    """
    if not config_file.is_file():
        return
    spec, _ = identity(model)
    try:
        config = text_config(read_json(config_file), spec.builder is not None)
    except ModelError as error:
        raise CheckpointError(f"{config_file}: {error}") from error
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is not None and architecture not in spec.architectures:
        try:
            other = spec_for_architecture(architecture)
        except ModelError:
            other = None
        if other is None or other.weight_maps.get("hf") != spec.weight_maps.get("hf"):
            raise CheckpointError(
                f"{config_file}: the checkpoint is a {architecture}, the model in the config is of the family "
                f"'{spec.name}' ({', '.join(spec.architectures)}): use a builder of the checkpoint's family."
            )
        spec = other
    try:
        described = spec.from_hf_config(config)
    except ModelError as error:
        get_logger().warning(f"{config_file} is not compared with the model: {error}")
        return
    check_description(model, described, config_file)


def check_description(model: nn.Module, theirs: Description, where: Path) -> None:
    """Compare the fields of descriptions that shapes do not determine; log a warning if the model may differ.

    Raises:
        CheckpointError: the numbers of heads differ.
    """
    _, ours = identity(model)
    if (theirs.num_heads, theirs.num_kv_heads) != (ours.num_heads, ours.num_kv_heads):
        raise CheckpointError(
            f"{where}: the checkpoint has {theirs.num_heads} heads ({theirs.num_kv_heads} of keys and values), the "
            f"model in the config {ours.num_heads} ({ours.num_kv_heads}): use the builder of this checkpoint."
        )
    for name in _UNSEEN:
        if getattr(theirs, name) != getattr(ours, name):
            log_once(
                get_logger(),
                f"{where} says {name} = {getattr(theirs, name)}, the model in the config is built with "
                f"{getattr(ours, name)}: the latter holds.",
                level=logging.WARNING,
            )


def initialize_rest(model: nn.Module, loaded: set[str], device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Initialize parameters that are not in the checkpoint with their modules' ``initialize_parameters()``.

    Args:
        model: model after :func:`load_base`.
        loaded: names of the loaded parameters.
        device: device on which parameters on the meta device are materialized.
        dtype: dtype of these parameters; unchanged by default.

    Raises:
        CheckpointError: no module initializes a parameter, or a buffer is on the meta device.
    """
    left = [name for name, _ in model.named_parameters() if name not in loaded]
    for path, module in model.named_modules():
        inside = [name for name in left if name.startswith(f"{path}." if path else "")]
        if inside and hasattr(module, "initialize_parameters"):
            for name in inside:
                materialize(model, name, device, dtype)
            _initialize(model, path, module, inside)
            left = [name for name in left if name not in inside]
    left = [name for name in left if model.get_parameter(name).is_meta]
    if left:
        raise CheckpointError(
            f"The checkpoint holds no value for '{left[0]}'{f' and {len(left) - 1} more' if left[1:] else ''}, and its "
            "module has no initialize_parameters() to make one."
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise CheckpointError(
                f"The buffer '{name}' is on the meta device: checkpoints hold no buffers, so its module must make it "
                "when it is used."
            )


def _initialize(model: nn.Module, path: str, module: nn.Module, names: list[str]) -> None:
    """Initialize parameters of a module as full tensors; each rank keeps its shard."""
    inside = {f"{path}.{name}" if path else name: parameter for name, parameter in module.named_parameters()}
    reads_base = getattr(module, "initialize_reads_base", True)
    sharded = {
        name: parameter
        for name, parameter in inside.items()
        if isinstance(parameter, DTensor) and (name in names or reads_base)
    }
    full = {
        name: torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if name in names
        else full_tensor(parameter)
        for name, parameter in sharded.items()
    }
    with replaced_parameters(model, full):
        module.initialize_parameters()
    for name in names:
        if name in full:
            slices, local = my_shard(sharded[name])
            local.copy_(full[name][slices])


# Files that are not copied from the source folder: weights, and files that an export writes itself.
_LEFT_BEHIND = (".pt", ".pth", ".bin", ".safetensors", ".gguf", ".ckpt", ".index.json", ".distcp", ".h5", ".tmp")
_WRITTEN_ANEW = ("config.json", "torchtune_config.yaml")
_OWN_FOLDERS = ("epoch_", "step_", "recipe_state")
_FOLDERS_OF_A_CHECKPOINT = ("state", "adapter", "logs", "__pycache__")
_MAX_CARRIED_BYTES = 100 * 2**20
_SAMPLE_BYTES = 2**20
GENERATION_CONFIG = "generation_config.json"


class ModelSource:
    """Source of one model's weights.

    Reads safetensors (one file or shards), torch files, Meta's consolidated files and GGUF; the format follows from the
    names of the tensors. Weights are streamed: host memory holds at most one shard file.

    Args:
        checkpoint_dir: folder of the weights, usually as downloaded.
        checkpoint_files: names of the weight files, or ``{filename_format, max_filename}``; found by default.
        adapter_checkpoint: initial adapter: a folder in PEFT's layout, a file in such a folder, or the
            ``adapter_model.pt`` of an older checkpoint; an absolute path, or relative to the working directory or
            ``checkpoint_dir``.
        model_type: name of a :class:`ModelType`; it must match the model.
        text_only: export the text decoder as a separate model. By default other towers and weights for multi-token
            prediction are exported with it, unchanged.
        adapter_dirs: further base folders of a relative ``adapter_checkpoint``, such as the output folder of the run.
        repo_id: repository of the weights, which adapters name as their base; by default the repository that
            ``tune download`` recorded in the folder.

    Raises:
        CheckpointError: ``model_type`` is unknown.

    Example:
        >>> source = torchtune.training.ModelSource(checkpoint)
        >>> len(source.open().names())
        20
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        *,
        adapter_checkpoint: str | None = None,
        model_type: str | None = None,
        text_only: bool = False,
        adapter_dirs: Iterable[Path] = (),
        repo_id: str | None = None,
    ) -> None:
        if model_type is not None and model_type not in ModelType.__members__:
            raise CheckpointError(f"model_type: '{model_type}' is none of {', '.join(ModelType.__members__)}.")
        self.checkpoint_dir = Path(checkpoint_dir)
        refuse_foreign(self.checkpoint_dir, "checkpointer.checkpoint_dir")
        self.checkpoint_files = checkpoint_files
        self.adapter_checkpoint = adapter_checkpoint
        self.model_type = None if model_type is None else ModelType[model_type]
        self.text_only = text_only
        self.repo_id = repo_id
        self._adapter_dirs = (Path(), self.checkpoint_dir, *adapter_dirs)
        # From a GGUF file: tokenizer files of an export, by name, and token ids for its config.json.
        self._tokenizer_files: dict[str, Any] = {}
        self._token_ids: dict[str, int] = {}

    def open(self, model: nn.Module | None = None) -> Source:
        """Open the weight files; for a multimodal checkpoint, only the text decoder unless ``model`` is composite."""
        return open_source(resolve_files(self.checkpoint_dir, self.checkpoint_files), model)

    def whole(self, model: nn.Module) -> TextTower | None:
        """Return the opened checkpoint if it has more tensors than the model; None if the model is exported alone.

        The other tensors belong to other towers, or to untrained layers for multi-token prediction.
        """
        if not hasattr(self, "_whole"):
            self._whole = self._find_whole(model)
        return self._whole

    def _find_whole(self, model: nn.Module) -> TextTower | None:
        config = self.checkpoint_dir / "config.json"
        if self.text_only or not config.is_file():
            return None
        source = self.open(model)
        if not isinstance(source, TextTower) or (source.is_multimodal and "text_config" not in read_json(config)):
            return None
        return source

    def read(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> set[str]:
        """Load ``model`` from the files; parameters on the meta device are materialized on ``device``.

        Args:
            model: sharded or not; every rank reads its own shard.
            device: device of materialized parameters.
            dtype: dtype of materialized parameters; unchanged by default.

        Returns:
            Names of the loaded parameters.

        Raises:
            CheckpointError: files are missing or corrupt, or do not fit the model.
        """
        source, weights = self.open(model), ModelWeights(model)
        self.whole(model)  # opened now: the folder may be gone when the model is saved
        if isinstance(source, GGUFFile) and not (self.checkpoint_dir / "tokenizer.json").exists():
            self._tokenizer_files, self._token_ids = tokenizer_files(source), special_ids(source)
        self._check_description(model, source)
        init = wanted_start(model)
        starts = {} if init is None else startable(weights, init, self.checkpoint_dir)
        left_out = load_base(weights, source, device, dtype, starts)
        model.adapter_init = init
        if (adapter := self._find_adapter(weights)) is not None:
            add_new_tokens(model, adapter)
            weights = ModelWeights(model)
            load_adapter(weights, adapter, device, dtype)
            return weights.parameters.keys() - left_out
        started = {f"{name.removesuffix('weight')}lora_{side}.weight" for name in starts for side in "ab"}
        return weights.parameters.keys() - left_out - (weights.owned - started)

    def check(self, model: nn.Module) -> None:
        """Check files, family, names and shapes against ``model`` on the meta device; no tensor data is read.

        Raises:
            CheckpointError: see :meth:`read`; truncated files are only found by :meth:`read`.
        """
        self.check_model_type(model)
        source, weights = self.open(model), ModelWeights(model)
        self._check_description(model, source)
        check_base(weights, source)
        self._find_adapter(weights)

    def _check_description(self, model: nn.Module, source: Source) -> None:
        if isinstance(source, GGUFFile):
            check_description(model, source.description, source.path)
        else:
            check_config(model, self.checkpoint_dir / "config.json")

    def check_model_type(self, model: nn.Module) -> None:
        """Check ``model_type``, which selected the weight names in older configs, against the model's family."""
        spec = getattr(model, "spec", None)
        if self.model_type is None or spec is None or self.model_type.name in spec.model_types:
            return
        try:
            named = get_spec(self.model_type.value)
        except ModelError:
            named = None
        if named is None or named.weight_map("hf") != spec.weight_map("hf"):
            raise CheckpointError(
                f"model_type: {self.model_type.name} is not the kind of the model, which is '{spec.name}': leave "
                "model_type out, or use a builder of that kind."
            )

    def _find_adapter(self, weights: ModelWeights) -> Path | None:
        if self.adapter_checkpoint is None:
            return adapter_beside_base(self.checkpoint_dir, weights)
        return find_adapter(self._adapter_path(self.adapter_checkpoint), weights)

    def _adapter_path(self, adapter_checkpoint: str) -> Path:
        candidates = [folder / adapter_checkpoint for folder in self._adapter_dirs]
        return next((path for path in candidates if path.exists()), candidates[-1])

    @cached_property
    def base_fingerprint(self) -> list[list[int]]:
        """Size and CRC-32 of samples of every weight file, independent of the folder.

        Only the first, middle and last MiB of a file are read: fine-tuning changes weights everywhere.
        """
        return [_sample(path) for path in resolve_files(self.checkpoint_dir, self.checkpoint_files)]

    @cached_property
    def fingerprint(self) -> list[list[int]]:
        """:attr:`base_fingerprint`, extended by the adapters that are loaded with the weights."""
        paths = _adapters_in(self.checkpoint_dir)
        if self.adapter_checkpoint is not None:
            path = self._adapter_path(self.adapter_checkpoint)
            paths += _adapters_in(path) if path.is_dir() else [path]
        return self.base_fingerprint + [_sample(path) for path in dict.fromkeys(paths)]

    def carry_files(self, folder: Path, *, tokenizer: bool = True) -> None:
        """Copy tokenizer, chat template, generation settings and other small files into an export; overwrite nothing.

        From a folder without ``config.json``, such as a folder of downloaded GGUF files, only tokenizer files and
        generation settings are copied. For a GGUF source, they are created from its metadata.

        Args:
            folder: folder of the export.
            tokenizer: whether to copy tokenizer and chat template.
        """
        base = self.checkpoint_dir
        own = (base / "config.json").is_file()
        # Folders of the other models in a checkpoint.
        models = [path.parent.name for path in base.glob("*/config.json")] if (base / MARKER).exists() else []
        for path in sorted(base.rglob("*") if own else base.glob("*")):
            relative, target = path.relative_to(base), folder / path.relative_to(base)
            is_of_tokenizer = is_tokenizer_file(relative)
            if _stays_behind(relative) or relative.parts[0] in models or target.exists():
                continue
            if not (own or is_of_tokenizer or path.name == GENERATION_CONFIG) or (is_of_tokenizer and not tokenizer):
                continue
            if path.is_file() and path.stat().st_size <= _MAX_CARRIED_BYTES:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        for name, content in self._tokenizer_files.items():
            if not (folder / name).exists() and (tokenizer or not is_tokenizer_file(Path(name))):
                write_json(folder / name, content)
        if self._token_ids:
            write_json(folder / "config.json", {**read_json(folder / "config.json"), **self._token_ids})

    def base_name(self) -> str:
        """Return the known repository of weights that are not fine-tuned, otherwise the folder."""
        if self.repo_id is not None:
            return self.repo_id
        path = self.checkpoint_dir / "original_repo_id.json"
        if path.is_file() and not (self.checkpoint_dir / MARKER).exists():
            name = read_json(path).get("repo_id")
            if isinstance(name, str):
                return name
        return str(self.checkpoint_dir.resolve())


def _adapters_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("adapter_*") if path.suffix in (".safetensors", ".pt", ".bin"))


def _sample(path: Path) -> list[int]:
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for start in dict.fromkeys((0, size // 2, max(size - _SAMPLE_BYTES, 0))):
            file.seek(start)
            crc = zlib.crc32(file.read(_SAMPLE_BYTES), crc)
    return [size, crc]


def _stays_behind(relative: Path) -> bool:
    """Return whether a file of the source is hidden, holds weights, belongs to a run, or is written by the export."""
    name = relative.name
    return (
        any(part.startswith(".") for part in relative.parts)
        or relative.parts[0].startswith(_OWN_FOLDERS)
        or (len(relative.parts) > 1 and relative.parts[0] in _FOLDERS_OF_A_CHECKPOINT)
        or name.endswith(_LEFT_BEHIND)
        or name.startswith(("adapter_config", "adapter_model", "adapter_conversions"))
        or str(relative) in _WRITTEN_ANEW
    )
