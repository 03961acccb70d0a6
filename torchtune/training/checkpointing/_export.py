"""Exporting weights to folders that other libraries load."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from torchtune.models import Description, Group, ModelError, ModelSpec, text_config, with_text_config
from torchtune.training.checkpointing._directories import MARKER
from torchtune.training.checkpointing._full_weights import FullWeights
from torchtune.training.checkpointing._load import check_names, identity, read_json
from torchtune.training.checkpointing._open_source import TextTower
from torchtune.training.checkpointing._safetensors_file import Entry, TensorFile, TensorSlice, num_bytes, write_file
from torchtune.training.checkpointing._sources import SAFETENSORS_INDEX
from torchtune.training.parallel._ranks import Ranks
from torchtune.utils import write_json

MAX_SHARD_BYTES = 5 * 10**9
# Files that are not copied from the source folder: weights, and files that an export writes itself.
_LEFT_BEHIND = (".pt", ".pth", ".bin", ".safetensors", ".gguf", ".ckpt", ".index.json", ".distcp", ".h5", ".tmp")
_WRITTEN_ANEW = ("config.json", "torchtune_config.yaml")
_OWN_FOLDERS = ("epoch_", "step_", "recipe_state")
_FOLDERS_OF_A_CHECKPOINT = ("state", "adapter", "logs", "__pycache__")
_TOKENIZER_FILES = (
    "tokenizer",
    "tekken",
    "generation_config",
    "chat_template",
    "special_tokens_map",
    "vocab.",
    "merges.txt",
)
_MAX_CARRIED_BYTES = 100 * 2**20


def model_entries(model: nn.Module, ranks: Ranks, *, merge: bool, whole: TextTower | None = None) -> list[Entry]:
    """The base weights under Hugging Face names, as entries of files.

    Making them needs memory for one tensor. To merge into a sharded model, all ranks make an entry together.

    Args:
        model: without its adapters, unless ``merge``.
        ranks: every rank makes its own shard.
        merge: merge adapters into the weights, in float32, then round.
        whole: the multimodal checkpoint that the model is the text decoder of: the export uses its names, and its
            other towers are written unchanged.

    Raises:
        CheckpointError: a parameter has no name in Hugging Face's format.
    """
    spec, description = identity(model)
    spec = spec if whole is None else spec.as_part(whole.prefixes)
    weights = FullWeights(model)
    groups = spec.weight_map("hf").groups(description)
    check_names(model, exported=True)
    entries = [group_entry(group, weights, ranks, turn, merge=merge) for turn, group in enumerate(groups)]
    return entries if whole is None else [*entries, *whole.other_towers(ranks)]


def group_entry(group: Group, weights: FullWeights, ranks: Ranks, turn: int, *, merge: bool = False) -> Entry:
    """The tensors of one group, under their external names.

    Args:
        group: of a weight map.
        weights: of the model.
        ranks: every rank makes its own shard.
        turn: chooses the writer among replicas, see :meth:`LocalShard.of`.
        merge: merge adapters into the weights.
    """
    specs = dict(zip(group.external, group.to_external([weights.spec(name) for name in group.tune]), strict=True))
    shapes = [spec.shape for spec in specs.values()]

    def make() -> Iterator[TensorSlice]:
        for name in group.tune:
            shard = (weights.merged_shard if merge else weights.shard)(name, ranks, turn)
            for part in group.external_slices(name, shard.slices, shapes) if shard.is_writer else ():
                start = [dim.start for dim in part.slices]
                yield TensorSlice.of(group.external[part.external], part.of(shard.data), start)

    return Entry(specs, make)


def shards(entries: Iterable[Entry], max_shard_bytes: int, folder: str = "") -> tuple[list[TensorFile], dict | None]:
    """``model.safetensors``, or shard files and the contents of their index.

    Args:
        entries: the tensors. Larger dtypes come first, so that all are aligned; the order is otherwise kept.
        max_shard_bytes: larger models are split into several files.
        folder: subfolder of the checkpoint, with a slash at its end.
    """
    entries = sorted(entries, key=lambda entry: -entry.element_size)
    split: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        entry_size = sum(map(num_bytes, entry.specs.values()))
        if split[-1] and size + entry_size > max_shard_bytes:
            split.append([])
            size = 0
        split[-1].append(entry)
        size += entry_size
    if len(split) == 1:
        return [TensorFile(f"{folder}model.safetensors", entries)], None
    files = [
        TensorFile(f"{folder}model-{number:05d}-of-{len(split):05d}.safetensors", shard)
        for number, shard in enumerate(split, 1)
    ]
    index = {name: file.path.removeprefix(folder) for file in files for name in file.specs}
    return files, {"metadata": {"total_size": sum(file.size for file in files)}, "weight_map": index}


def write_entries(entries: Iterable[Entry], folder: Path, max_shard_bytes: int) -> None:
    """Write entries that are all made on this rank, one at a time."""
    files, index = shards(entries, max_shard_bytes)
    for file in files:
        write_file(file, folder)
    if index is not None:
        write_json(folder / SAFETENSORS_INDEX, index)


def config_of_model(model: nn.Module, source_dir: Path | None, *, is_part: bool = False) -> dict:
    """Contents of ``config.json``: those of the source, updated with what differs in the model.

    Args:
        model: decides the description, the dtype and the vocabulary size.
        source_dir: folder of the source.
        is_part: whether the model is the text decoder of a multimodal source, which the file describes too.
    """
    spec, description = identity(model)
    weights = FullWeights(model)
    embedding = weights.spec(next(name for name in weights.base if name.endswith("tok_embeddings.weight")))
    config = config_of(spec, description, embedding.shape[0], embedding.dtype, source_dir)
    return with_text_config(read_json(source_dir / "config.json"), config) if is_part else config


def config_of(
    spec: ModelSpec, description: Description, vocab_size: int, dtype: torch.dtype, source_dir: Path | None
) -> dict:
    """Contents of a ``config.json``; see :func:`config_of_model`."""
    description = replace(description, vocab_size=vocab_size)
    source = None if source_dir is None else source_dir / "config.json"
    config = text_config(read_json(source)) if source is not None and source.is_file() else {}
    if not _says(config, spec, description):
        # Fields with two spellings must not contradict each other.
        config = {key: value for key, value in config.items() if key not in ("rope_parameters", "torch_dtype")}
        longest = config.get("max_position_embeddings")
        config |= spec.to_hf_config(description)
        if longest:
            config["max_position_embeddings"] = longest
    config.pop("quantization_config", None)  # the export is not quantized
    if spec.builder is None:
        config["vocab_size"] = vocab_size
    name = str(dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
    if "dtype" in config:
        config["dtype"] = name
    for part in (config.get("text_config"), config.get("vision_config")) if spec.builder is not None else ():
        part |= {key: name for key in ("dtype", "torch_dtype") if key in part}
    return config


def _says(config: dict, spec: ModelSpec, description: Description) -> bool:
    """Whether a config describes this model, apart from its context length and dropout."""
    if not config:
        return False
    try:
        theirs = spec.from_hf_config(config)
    except ModelError:
        return False
    same = {"max_seq_len": description.max_seq_len, "attn_dropout": description.attn_dropout}
    return replace(theirs, vocab_size=description.vocab_size, **same) == description


def carry_files(source_dir: Path, folder: Path) -> None:
    """Copy tokenizer, chat template, generation settings and other small files of the source; overwrite nothing.

    From a folder without ``config.json``, such as a folder of downloaded GGUF files, only tokenizer files are copied.
    """
    own = (source_dir / "config.json").is_file()
    # Folders of the other models in a checkpoint.
    models = [path.parent.name for path in source_dir.glob("*/config.json")] if (source_dir / MARKER).exists() else []
    for path in sorted(source_dir.rglob("*") if own else source_dir.glob("*")):
        relative, target = path.relative_to(source_dir), folder / path.relative_to(source_dir)
        if (
            _stays_behind(relative)
            or relative.parts[0] in models
            or not (own or path.name.startswith(_TOKENIZER_FILES))
            or target.exists()
        ):
            continue
        if path.is_file() and path.stat().st_size <= _MAX_CARRIED_BYTES:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _stays_behind(relative: Path) -> bool:
    """Whether a file of the source is hidden, holds weights, belongs to a run, or is written by the export."""
    name = relative.name
    return (
        any(part.startswith(".") for part in relative.parts)
        or relative.parts[0].startswith(_OWN_FOLDERS)
        or (len(relative.parts) > 1 and relative.parts[0] in _FOLDERS_OF_A_CHECKPOINT)
        or name.endswith(_LEFT_BEHIND)
        or name.startswith(("adapter_config", "adapter_model", "adapter_conversions"))
        or str(relative) in _WRITTEN_ANEW
    )
