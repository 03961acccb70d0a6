"""Load the weights of a model from its source: a folder, its files and its adapter."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.checkpoints._adapter import (
    adapter_beside_base,
    adapter_init_method,
    add_new_tokens,
    find_adapter,
    load_adapter,
    splittable_layers,
)
from torchtune.checkpoints._adapter_settings import ADAPTER_CONFIG_FILE, init_from_base, read_settings
from torchtune.checkpoints._directories import MARKER
from torchtune.checkpoints._gguf import GGUFFile
from torchtune.checkpoints._model_weights import (
    ModelWeights,
    check_shape,
    groups_by_weight,
    materialize,
    replaced_parameters,
    set_parameter,
)
from torchtune.checkpoints._small_files import check_config, check_description, copy_small_files
from torchtune.checkpoints._weight_files import (
    CheckpointError,
    TextDecoderFiles,
    WeightFiles,
    open_weight_files,
    read_json,
    resolve_files,
)
from torchtune.models import (
    Description,
    Group,
    Identity,
    ModelError,
    ModelSpec,
    Slices,
    WeightMap,
    WeightMapError,
    get_spec,
)
from torchtune.modules.embeddings import VocabularyGrowth, vocabulary_weights
from torchtune.modules.peft import LoRALinear
from torchtune.modules.transformer import text_decoder
from torchtune.tokenizers import is_tokenizer_file
from torchtune.training.parallel import full_tensor, my_shard
from torchtune.utils import (
    get_logger,
    local_path,
    log_rank_zero,
    refuse_path_of_other_user,
    sign_of_life,
    write_json,
)

# Bytes of each sample of a file for its fingerprint.
_SAMPLE_BYTES = 2**20
# The output layer, which a classifier does not take from a language model.
_HEAD = "output.weight"
_ADVICE = "check checkpoint_dir and checkpoint_files against the model in the run's config"


class ModelType(Enum):
    """Allowed values of ``model_type:``, which must match the spec of the model.

    Example:
        >>> torchtune.checkpoints.ModelType["QWEN3"].name
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


class ModelSource:
    """Source of one model's weights.

    Reads safetensors (one file or shards), torch files, Meta's consolidated files and GGUF; the format follows from the
    names of the tensors. Weights are streamed: host memory holds at most one shard file.

    Args:
        checkpoint_dir: folder of the weights, usually as downloaded, or a URL such as ``s3://bucket/model``, which is
            fetched once into a cache.
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
        >>> source = torchtune.checkpoints.ModelSource(checkpoint)
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
            raise CheckpointError(f"model_type: '{model_type}' is not one of {', '.join(ModelType.__members__)}.")
        self.checkpoint_dir = local_path(checkpoint_dir, "checkpointer.checkpoint_dir")
        # A folder below /tmp, for example, may be prepared by another user, with weights and a chat template.
        refuse_path_of_other_user(self.checkpoint_dir, "checkpointer.checkpoint_dir")
        self.checkpoint_files = checkpoint_files
        self.adapter_checkpoint = adapter_checkpoint
        self.model_type = None if model_type is None else ModelType[model_type]
        self.text_only = text_only
        self.repo_id = repo_id
        # In the order of the search; an absolute path is the same in each.
        self._adapter_dirs = (Path(), self.checkpoint_dir, *adapter_dirs)
        # Of a tokenizer inside the weight files: its files in an export, by name, and token ids for config.json.
        self._tokenizer_files: dict[str, Any] = {}
        self._token_ids: dict[str, int] = {}
        # The opened checkpoint of a larger model, if only its text decoder is loaded; see `enclosing_checkpoint`.
        self._enclosing: TextDecoderFiles | None = None
        self._is_enclosing_opened = False  # also True if there is none
        # Of weights that stay in their files until they are written.
        self._readers: Mapping[str, WeightReader] = {}

    def open(self, model: nn.Module | None = None) -> WeightFiles:
        """Open the weight files; for a multimodal checkpoint, only the text decoder unless ``model`` is composite."""
        paths = resolve_files(self.checkpoint_dir, self.checkpoint_files)
        if {path.suffix for path in paths} != {".gguf"}:
            return open_weight_files(paths, model)
        if len(paths) > 1:
            raise CheckpointError("checkpoint_files: a GGUF checkpoint is one file: name just one.")
        return GGUFFile(paths[0])

    def enclosing_checkpoint(self, model: nn.Module) -> TextDecoderFiles | None:
        """Return the opened checkpoint if it has more tensors than the model; None if the model is exported alone.

        The other tensors belong to other towers, or to untrained layers for multi-token prediction.
        """
        config = self.checkpoint_dir / "config.json"
        if not self._is_enclosing_opened and not self.text_only and config.is_file():
            files = self.open(model)
            if isinstance(files, TextDecoderFiles):
                # An export of the composite model needs its config, which describes both.
                has_config = not files.is_multimodal or "text_config" in read_json(config)
                self._enclosing = files if has_config else None
        self._is_enclosing_opened = True
        return self._enclosing

    def load(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> set[str]:
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
        files = self.open(model)
        weights = ModelWeights(model)
        self.enclosing_checkpoint(model)  # opened now: the folder may be gone when the model is saved
        # GGUF files have the tokenizer inside; one beside them comes first.
        if not (self.checkpoint_dir / "tokenizer.json").exists():
            self._tokenizer_files = files.tokenizer_files()
            self._token_ids = files.special_token_ids()
        self._check_description(model, files)
        # Base weights first: an adapter may be split off them, and rows of new tokens extend them.
        init = adapter_init_method(model)
        split_layers = {} if init is None else splittable_layers(weights, init, self.checkpoint_dir)
        if self._leaves_base_in_files(weights, split_layers):
            self._readers, new_weights = _base_readers(weights, files)
        else:
            new_weights = load_base(weights, files, device, dtype, split_layers)
        model.adapter_init = init  # load_adapter does not subtract an initial adapter again, and a save writes the kind
        adapter = self._find_adapter(weights)
        if adapter is not None:
            add_new_tokens(model, adapter)
            weights = ModelWeights(model)  # with the parameters of new tokens
            load_adapter(weights, adapter, device, dtype)
            # The file of an adapter also has the weights that were trained whole, such as a classifier's new head.
            return weights.parameters.keys() - new_weights.difference(weights.trained_whole)
        split_off = set()  # parameters of adapters that were split off the base weights
        for name in split_layers:
            layer = name.removesuffix("weight")
            split_off.add(f"{layer}lora_a.weight")
            split_off.add(f"{layer}lora_b.weight")
        not_loaded = new_weights | (weights.owned - split_off)
        return weights.parameters.keys() - not_loaded

    read = load  # the name of earlier releases

    @property
    def unread(self) -> "UnreadWeights | None":
        """Weights that :meth:`load` has left in their files; None if it has read all."""
        return UnreadWeights(self._readers) if self._readers else None

    def _leaves_base_in_files(self, weights: ModelWeights, split_layers: Mapping[str, LoRALinear]) -> bool:
        """Return whether :meth:`load` leaves the base weights in their files, for a :class:`StreamedSource`."""
        return False

    def check(self, model: nn.Module) -> None:
        """Check files, family, names and shapes against ``model`` on the meta device; no tensor data is read.

        Raises:
            CheckpointError: see :meth:`load`; truncated files are only found by :meth:`load`.
        """
        self.check_model_type(model)
        files = self.open(model)
        weights = ModelWeights(model)
        self._check_description(model, files)
        check_base(weights, files)
        self._find_adapter(weights)

    def _check_description(self, model: nn.Module, files: WeightFiles) -> None:
        described = files.described_model()
        if described is None:
            check_config(model, self.checkpoint_dir / "config.json")
        else:
            check_description(model, described, files.location())

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
        """Return the path of an adapter: in the first folder that has it, else in the last, for the error message."""
        for folder in self._adapter_dirs:
            path = folder / adapter_checkpoint
            if path.exists():
                break
        return path

    @cached_property
    def base_fingerprint(self) -> list[list[int]]:
        """Size and CRC-32 of samples of every weight file, independent of the folder.

        Only the first, middle and last MiB of a file are read: fine-tuning changes weights everywhere.
        """
        return [_file_fingerprint(path) for path in resolve_files(self.checkpoint_dir, self.checkpoint_files)]

    @cached_property
    def fingerprint(self) -> list[list[int]]:
        """:attr:`base_fingerprint`, extended by the adapters that are loaded with the weights."""
        paths = _adapters_in(self.checkpoint_dir)
        if self.adapter_checkpoint is not None:
            path = self._adapter_path(self.adapter_checkpoint)
            if path.is_dir():
                paths += _adapters_in(path)
            else:
                paths.append(path)
        # Once each: the adapter may be in the folder of the weights.
        return self.base_fingerprint + [_file_fingerprint(path) for path in dict.fromkeys(paths)]

    def carry_files(self, folder: Path, *, tokenizer: bool = True) -> None:
        """Copy tokenizer, chat template, generation settings and other small files into an export; overwrite nothing.

        From a folder without ``config.json``, such as a folder of downloaded GGUF files, only tokenizer files and
        generation settings are copied. For a GGUF source, they are created from its metadata.

        Args:
            folder: folder of the export.
            tokenizer: whether to copy tokenizer and chat template.
        """
        copy_small_files(self.checkpoint_dir, folder, tokenizer=tokenizer)
        for name, content in self._tokenizer_files.items():
            is_unwanted = not tokenizer and is_tokenizer_file(Path(name))
            if not is_unwanted and not (folder / name).exists():
                write_json(folder / name, content)
        if self._token_ids:
            config = read_json(folder / "config.json")
            config.update(self._token_ids)
            write_json(folder / "config.json", config)

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


class StreamedSource(ModelSource):
    """Source of a model that is only written again: its base weights stay in their files until they are written.

    :meth:`load` reads the adapter and leaves the base weights on the meta device, so that a model of any size needs
    host memory for a few tensors. :func:`torchtune.save` then reads and writes one weight at a time. An adapter that
    changes the base when it is loaded (PiSSA, OLoRA, rows of new tokens) has all of it read.
    """

    def load(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> set[str]:
        """Load the adapter and other owned parameters; see :meth:`ModelSource.load`."""
        loaded = super().load(model, device, dtype)
        # The adapter may hold some of the base weights, trained whole.
        weights = ModelWeights(model)
        readers = {}
        for name, reader in self._readers.items():
            if all(weights.parameters[parameter_name].is_meta for parameter_name in weights.storage_of(name)):
                readers[name] = reader
        self._readers = readers
        return loaded

    def _leaves_base_in_files(self, weights: ModelWeights, split_layers: Mapping[str, LoRALinear]) -> bool:
        if split_layers:
            return False
        adapter = self._find_adapter(weights)
        settings_file = None if adapter is None else adapter.with_name(ADAPTER_CONFIG_FILE)
        if settings_file is None or not settings_file.is_file():
            return True
        settings = read_settings(settings_file)
        # These adapters change the values of the base when they are loaded.
        return init_from_base(settings) is None and not settings.get("trainable_token_indices")


def _adapters_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("adapter_*") if path.suffix in (".safetensors", ".pt", ".bin"))


def _file_fingerprint(path: Path) -> list[int]:
    """Return the size of a file, and the CRC-32 of its first, middle and last bytes."""
    size = path.stat().st_size
    crc = 0
    with path.open("rb") as file:
        starts = (0, size // 2, max(size - _SAMPLE_BYTES, 0))
        for start in dict.fromkeys(starts):  # a small file has fewer samples
            file.seek(start)
            crc = zlib.crc32(file.read(_SAMPLE_BYTES), crc)
    return [size, crc]


def detect_format(files: WeightFiles, spec: ModelSpec, description: Description) -> str:
    """Return the format of the tensor names: a key of ``spec.weight_maps``, or ``"tune"`` for this library's.

    Raises:
        CheckpointError: the format is unknown for this family.
    """
    if files.name_format is not None:
        return files.name_format
    names = set(files.names())
    matches = {}  # number of names that belong to each format
    for name_format, weight_map in spec.weight_maps.items():
        external_names = set()
        tune_names = set()
        for group in weight_map.groups(description):
            external_names.update(group.external)
            tune_names.update(group.tune)
        matches[name_format] = len(names & external_names)
        # The formats may differ in the weights that they have names for.
        matches["tune"] = max(len(names & tune_names), matches.get("tune", 0))
    # Of formats with equally many names, the first one: the first weight map of the family comes before all others.
    best = max(matches, key=matches.__getitem__, default=None)
    if best is None or matches[best] == 0:
        example = "it holds no tensor"
        if names:
            example = f"its first tensor is '{files.names()[0]}'"
        raise CheckpointError(
            f"{files.location()}: no tensor belongs to a model of the family '{spec.name}' ({example}): {_ADVICE}."
        )
    return best


def load_base(
    weights: ModelWeights,
    files: WeightFiles,
    device: torch.device,
    dtype: torch.dtype | None = None,
    split_layers: Mapping[str, LoRALinear] | None = None,
) -> set[str]:
    """Fill the base weights of a model from files, one tensor at a time; every rank reads its own shard.

    Args:
        weights: the model's weights.
        files: weights in any format of the model's spec.
        device: device for parameters on the meta device.
        dtype: dtype for parameters on the meta device; unchanged by default.
        split_layers: adapted layers with weights that are split into the initial adapter and the remainder, by name of
            the weight.

    Returns:
        Names of base weights to initialize: the output layer of a classifier, if the files are of a language model.

    Raises:
        CheckpointError: names or shapes do not fit; the message names file, tensor and shapes.
    """
    weights.split_layers = dict(split_layers or {})
    readers, new_weights = _base_readers(weights, files)
    for reader in readers.values():
        load_weight(weights, reader, device, dtype)
        sign_of_life()
    return new_weights


def load_weight(
    weights: ModelWeights, reader: "WeightReader", device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Load this rank's shard of one weight from its files; see :func:`load_base`."""
    slices, target = weights.allocate(reader.name, device, dtype)
    if target.numel():  # the last ranks have no rows of a short weight
        reader.read(slices, target)
    if weights.is_converted(reader.name):  # else target is the shard of the parameter, which has its values now
        weights.store_converted(reader.name, slices, target, device, dtype)


@dataclass(frozen=True, eq=False)
class WeightReader:
    """Reads slices of one full weight from its files.

    Attributes:
        name: name of the weight.
        group: group of the weight, with the names of its external tensors in the files.
        shapes: shapes of the group's external tensors.
        files: the files.
    """

    name: str
    group: Group
    shapes: Sequence[Sequence[int]]
    files: WeightFiles

    def read(self, slices: Slices, target: torch.Tensor) -> None:
        """Read a slice of the weight into a tensor of its shape, from the slices of external tensors that form it."""
        self.group.read(self.name, slices, target, self.shapes, self.files.read)


@dataclass(frozen=True, eq=False)
class GrownWeightReader(WeightReader):
    """Reader of a weight with rows of new tokens, which the files do not have.

    Attributes:
        growth: the new rows.
        num_rows: number of rows of the full weight with them.
    """

    growth: VocabularyGrowth
    num_rows: int

    def read(self, slices: Slices, target: torch.Tensor) -> None:
        """Read the old rows of a slice into a tensor of its shape, and compute its new rows from the old ones."""
        rows, *columns = slices
        first_new = self.growth.first_new
        num_old = max(0, min(rows.stop, first_new) - rows.start)
        if num_old:
            old_rows = slice(rows.start, rows.start + num_old)
            super().read((old_rows, *columns), target[:num_old])
        if rows.stop <= first_new:
            return

        def read_rows(start: int, end: int) -> torch.Tensor:
            values = target.new_empty((end - start, *target.shape[1:]))
            WeightReader.read(self, (slice(start, end), *columns), values)
            return values

        # Every rank reads all old rows, because the new ones are means of them, and keeps those of its slice.
        new_rows = self.growth.initial_rows(self.num_rows - first_new, read_rows)
        first = rows.start + num_old - first_new
        last = rows.stop - first_new
        target[num_old:] = new_rows[first:last].to(target.dtype)


class UnreadWeights:
    """Base weights that stay in their files, and are in a model only while they are written.

    Args:
        readers: reader of each weight, by the name of the weight.
    """

    def __init__(self, readers: Mapping[str, WeightReader]) -> None:
        self._readers = readers

    @contextmanager
    def present(self, weights: ModelWeights, names: Iterable[str]) -> Iterator[None]:
        """Context manager that reads the unread weights among ``names`` into host memory, and frees them afterwards.

        Args:
            weights: the model's weights; unread ones are on the meta device.
            names: names of parameters and weights.
        """
        unread = [name for name in names if name in self._readers]
        meta_parameters = {}
        for name in unread:
            for parameter_name in weights.storage_of(name):
                meta_parameters[parameter_name] = weights.parameters[parameter_name]
        try:
            for name in unread:
                load_weight(weights, self._readers[name], torch.device("cpu"))
            yield
        finally:
            # The model has the parameters without values again, which frees the values.
            for parameter_name, parameter in meta_parameters.items():
                weights.parameters[parameter_name] = set_parameter(weights.model, parameter_name, parameter)


def _base_readers(weights: ModelWeights, files: WeightFiles) -> tuple[dict[str, WeightReader], set[str]]:
    """Return the reader of each base weight of a model, by name in file order, and the names of new base weights.

    Raises:
        CheckpointError: see :func:`load_base`.
    """
    readers: dict[str, WeightReader] = {}
    for group, shapes in _groups_to_load(weights, files, compare_tied=True):
        for name in group.tune:
            growth = _growth_of(weights, name)
            if growth is None:
                readers[name] = WeightReader(name, group, shapes, files)
            else:
                readers[name] = GrownWeightReader(name, group, shapes, files, growth, weights.specs[name].shape[0])
    if _HEAD in weights.base and _HEAD not in readers:
        log_rank_zero(get_logger(), f"{files.location()} is of a language model: the classifier's output layer is new.")
        return readers, {_HEAD}
    return readers, set()


def check_base(weights: ModelWeights, files: WeightFiles) -> None:
    """Check that files have the names and shapes that :func:`load_base` needs, without reading tensor data.

    Args:
        weights: the model's weights, on the meta device, not sharded.
        files: see :func:`load_base`.

    Raises:
        CheckpointError: see :func:`load_base`.
    """
    for _ in _groups_to_load(weights, files, compare_tied=False):
        pass


def _groups_to_load(
    weights: ModelWeights, files: WeightFiles, *, compare_tied: bool
) -> Iterator[tuple[Group, list[tuple[int, ...]]]]:
    """Yield the groups of tensors to read, in file order, with the shapes of their external tensors.

    Args:
        weights: the model's weights.
        files: see :func:`load_base`.
        compare_tied: also read and compare tensors that the model ties and the files store twice.
    """
    weights.check_names()
    spec, description = weights.spec_and_description
    name_format = detect_format(files, spec, description)
    if name_format == "tune":
        groups = _groups_of_own_names(weights, files, description)
    else:
        groups = _groups_of_format(weights, files, spec.weight_map(name_format), description, compare_tied=compare_tied)
    for group in groups:
        shapes = [files.shape(name) for name in group.external]
        # Some families have files with two layouts of a weight, which only its shape tells apart.
        group = group.for_shapes(shapes)
        # Conversions of names only rearrange tensors, so that they also convert shapes, on the meta device.
        specs = group.to_external([_spec_without_new_rows(weights, name) for name in group.tune])
        for name, shape, expected in zip(group.external, shapes, specs, strict=True):
            check_shape(files.path_of(name), name, shape, expected.shape)
        yield group, shapes


def _growth_of(weights: ModelWeights, name: str) -> VocabularyGrowth | None:
    """Return the new rows of a weight that is loaded for the first time; None if it has none."""
    if not weights.parameters[name].is_meta:
        return None
    decoder = text_decoder(weights.model)
    growth = getattr(decoder, "vocabulary_growth", None)
    if growth is None:
        return None
    parameter = weights.parameters[name]
    for decoder_name in vocabulary_weights(decoder):
        if decoder.get_parameter(decoder_name) is parameter:
            return growth
    return None


def _spec_without_new_rows(weights: ModelWeights, name: str) -> torch.Tensor:
    """Return a full weight on the meta device as files have it, without rows of new tokens."""
    growth = _growth_of(weights, name)
    spec = weights.specs[name]
    if growth is None:
        return spec
    return spec.new_empty((growth.rows_in_files, *spec.shape[1:]))


def _groups_of_own_names(weights: ModelWeights, files: WeightFiles, description: Description) -> list[Group]:
    """Return one group per base weight of files with this library's names."""
    names = set(files.names())
    missing = sorted(weights.base - names)
    if missing:
        raise CheckpointError(f"{files.location()} lacks the tensor '{missing[0]}', which the model needs: {_ADVICE}.")
    unexpected = sorted(names - weights.base - weights.owned)
    if unexpected:
        raise CheckpointError(
            f"{files.path_of(unexpected[0])}: the tensor '{unexpected[0]}' has no place in the model: {_ADVICE}."
        )
    groups = []
    for name in files.names():
        if name in weights.base:  # an adapter's parameters are loaded later
            groups.append(Group((name,), (name,), Identity(), description))
    return groups


def _groups_of_format(
    weights: ModelWeights,
    files: WeightFiles,
    weight_map: WeightMap,
    description: Description,
    *,
    compare_tied: bool,
) -> list[Group]:
    """Return the groups of files with the names of a weight map, without the output layer if it would be new."""
    if compare_tied:  # select ignores the second copy of a tied tensor
        _check_tied(weights, weight_map, description, files)
    names = files.names()
    is_new_head = description.is_classifier and not _head_names(weight_map, description) & set(names)
    if is_new_head:
        if not weights.parameters[_HEAD].requires_grad:
            raise CheckpointError(
                f"{files.location()} is of a language model: the classifier's output layer would be new and, under an "
                "adapter, never trained: train it beside the adapter (train_modules: [output] of "
                "torchtune.modules.peft.LoRA), or start from a classifier's checkpoint."
            )
        # A classifier has no projection to the vocabulary.
        vocabulary_projection = _head_names(weight_map, replace(description, num_classes=0))
        names = [name for name in names if name not in vocabulary_projection]
    try:
        # Nothing is read for a new head, so that the files may lack its tensors.
        return weight_map.select(names, description, lambda name: name != _HEAD or not is_new_head)
    except WeightMapError as error:
        raise CheckpointError(f"{files.location()}: {str(error).rstrip('.')}: {_ADVICE}.") from error


def _head_names(weight_map: WeightMap, description: Description) -> set[str]:
    """Return the external names of the output layer."""
    names = set()
    for group in weight_map.groups(description):
        if _HEAD in group.tune:
            names.update(group.external)
    return names


def _check_tied(weights: ModelWeights, weight_map: WeightMap, description: Description, files: WeightFiles) -> None:
    """Raise if the files store a tied tensor twice with different values; every rank compares its own shard."""
    names = set(files.names())
    groups = groups_by_weight(weight_map, description)
    for tie in weight_map.tied:
        original = groups[tie.source].external[0]
        if not getattr(description, tie.when) or tie.external not in names or original not in names:
            continue  # the model does not tie the weights, or the files store them once
        parameter = weights.parameters[tie.source]
        rows_in_files = _spec_without_new_rows(weights, tie.source).shape[0]
        slices, _ = my_shard(parameter)
        rows, *columns = slices
        # The shard may end with rows of new tokens, which no file has.
        rows = slice(min(rows.start, rows_in_files), min(rows.stop, rows_in_files))
        shapes = {files.shape(tie.external), files.shape(original)}
        differs = len(shapes) > 1
        # Another shape than the model's is refused later, with both shapes.
        if shapes == {(rows_in_files, *parameter.shape[1:])} and rows.start < rows.stop:
            tied_values = files.read(tie.external, (rows, *columns))
            original_values = files.read(original, (rows, *columns))
            differs = not torch.equal(tied_values, original_values)
        if differs:
            raise CheckpointError(
                f"{files.path_of(tie.external)}: '{tie.external}' differs from '{original}', but the model "
                "shares them: build it with tie_word_embeddings=False."
            )


def initialize_missing(model: nn.Module, loaded: set[str], device: torch.device, dtype: torch.dtype | None) -> None:
    """Initialize parameters that are not in the checkpoint with their modules' ``initialize_parameters()``.

    Args:
        model: model after :func:`load_base`.
        loaded: names of the loaded parameters.
        device: device on which parameters on the meta device are materialized.
        dtype: dtype of these parameters; None leaves it unchanged.

    Raises:
        CheckpointError: no module initializes a parameter, or a buffer is on the meta device.
    """
    missing = [name for name, _ in model.named_parameters() if name not in loaded]
    # Parents come before their children, so that a module that initializes its children's parameters does so once.
    for path, module in model.named_modules():
        if not hasattr(module, "initialize_parameters"):
            continue
        prefix = f"{path}." if path else ""
        inside = [name for name in missing if name.startswith(prefix)]
        if inside:
            for name in inside:
                materialize(model, name, device, dtype)
            _initialize(model, path, module, inside)
            missing = [name for name in missing if name not in inside]
    # A parameter that is not on the meta device has a value already.
    uninitialized = [name for name in missing if model.get_parameter(name).is_meta]
    if uninitialized:
        omitted = f" and {len(uninitialized) - 1} more" if len(uninitialized) > 1 else ""
        raise CheckpointError(
            f"The checkpoint holds no value for '{uninitialized[0]}'{omitted}, and its module has no "
            "initialize_parameters() to make one."
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise CheckpointError(
                f"The buffer '{name}' is on the meta device: checkpoints hold no buffers, so its module must make it "
                "when it is used."
            )


def _initialize(model: nn.Module, path: str, module: nn.Module, names: list[str]) -> None:
    """Initialize parameters of a module as full tensors; each rank keeps its shard. A collective.

    FSDP would initialize a shard from its own values. Full tensors become equal on all ranks.

    Args:
        model: the model.
        path: path of the module in the model.
        module: module with ``initialize_parameters``.
        names: parameters to initialize.
    """
    # Adapters such as DoRA's magnitude are computed from the weight of their layer, which is gathered for them.
    reads_base = getattr(module, "initialize_reads_base", True)
    sharded: dict[str, DTensor] = {}
    full: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters(prefix=path):
        if not isinstance(parameter, DTensor):
            continue
        if name in names:  # initialize_parameters sets all values
            full[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        elif reads_base:
            full[name] = full_tensor(parameter)
        else:
            continue
        sharded[name] = parameter
    with replaced_parameters(model, full):
        module.initialize_parameters()
    for name in names:
        if name in full:
            slices, local = my_shard(sharded[name])
            local.copy_(full[name][slices])
