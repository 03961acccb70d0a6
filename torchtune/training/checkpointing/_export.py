"""Writing weights as folders that other tools load."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from torchtune.models import Description, ModelError, ModelSpec
from torchtune.modules.conversion import get_conversions
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._load import identity, is_adapter_key, read_json
from torchtune.training.checkpointing._safetensors_file import num_bytes, write_safetensors
from torchtune.training.checkpointing._sources import SAFETENSORS_INDEX
from torchtune.utils import write_json

MAX_SHARD_BYTES = 5 * 10**9
# Never carried from the source folder into what is saved: weights, and what is written anew.
_LEFT_BEHIND = (".pt", ".pth", ".bin", ".safetensors", ".gguf", ".ckpt", ".index.json", ".distcp", ".h5", ".tmp")
_WRITTEN_ANEW = ("config.json", "torchtune_config.yaml")
_OWN_FOLDERS = ("epoch_", "step_", "recipe_state")
_FOLDERS_OF_A_CHECKPOINT = ("state", "adapter", "logs", "__pycache__")
_TOKENIZER_FILES = ("tokenizer", "generation_config", "chat_template", "special_tokens_map", "vocab.", "merges.txt")
_MAX_CARRIED_BYTES = 100 * 2**20

# Names and tensors that are written together, and how to make them.
Part = tuple[Mapping[str, torch.Tensor], Callable[[], Iterable[torch.Tensor]]]


def write_model(model: nn.Module, folder: Path, *, merge: bool, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the base weights under Hugging Face names: one safetensors file, or shards with an index.

    Besides the model itself no more than one tensor is held.

    Args:
        model: its adapters are left out, or with ``merge`` added to the weights (in float32, then rounded).
        folder: exists, and is temporary.
        merge: see above.
        max_shard_bytes: larger models are split.

    Raises:
        CheckpointError: the model has parameters that its weight map does not know, or misses some.
    """
    spec, description = identity(model)
    own = is_adapter_key(model)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters() if not own(name)}
    groups = spec.weight_map("hf").groups(description)
    if unknown := parameters.keys() - {name for group in groups for name in group.tune}:
        raise CheckpointError(
            f"The parameter '{min(unknown)}' has no name in Hugging Face's format: it cannot be saved."
        )

    def part(group) -> Part:
        meta = [torch.empty_like(parameters[name], device="meta") for name in group.tune]
        outline = dict(zip(group.external, group.to_external(meta), strict=True))

        def make() -> list[torch.Tensor]:
            ours = [_merged(model, name, parameters[name]) if merge else parameters[name] for name in group.tune]
            return group.to_external(ours)

        return outline, make

    write_parts([part(group) for group in groups], folder, max_shard_bytes)


def _merged(model: nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    for conversion in get_conversions(model):
        if hasattr(conversion, "merged"):
            weight = conversion.merged(name, weight, model)
    return weight


def write_parts(parts: list[Part], folder: Path, max_shard_bytes: int) -> None:
    """Write tensors that are made one part at a time, as ``model.safetensors`` or as shards with an index."""
    # Larger types first, so that everything is aligned; the order is otherwise kept.
    parts = sorted(parts, key=lambda part: -max(tensor.element_size() for tensor in part[0].values()))
    shards: list[list[Part]] = [[]]
    size = total = 0
    for part in parts:
        part_size = sum(num_bytes(tensor) for tensor in part[0].values())
        if shards[-1] and size + part_size > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part_size
        total += part_size
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        outline = {key: tensor for outline, _ in shard for key, tensor in outline.items()}
        write_safetensors(folder / name, outline, _made(shard))
        index.update(dict.fromkeys(outline, name))
    if len(shards) > 1:
        write_json(folder / SAFETENSORS_INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _made(shard: list[Part]) -> Iterator[tuple[str, torch.Tensor]]:
    for outline, make in shard:
        yield from zip(outline, make(), strict=True)


def write_config(model: nn.Module, folder: Path, source_dir: Path | None) -> None:
    """Write ``config.json``: the source's, with what the model has otherwise, or one made by the spec.

    Args:
        model: its description, its dtype and the rows of its embedding are what the file will say.
        folder: exists, and is temporary.
        source_dir: where the weights came from.
    """
    spec, description = identity(model)
    embedding = model.tok_embeddings.weight
    write_json(folder / "config.json", config_of(spec, description, embedding.shape[0], embedding.dtype, source_dir))


def config_of(
    spec: ModelSpec, description: Description, vocab_size: int, dtype: torch.dtype, source_dir: Path | None
) -> dict:
    """The contents of a ``config.json``; see :func:`write_config`."""
    description = replace(description, vocab_size=vocab_size)
    source = None if source_dir is None else source_dir / "config.json"
    config = read_json(source) if source is not None and source.is_file() else {}
    if not _says(config, spec, description):
        # What is spelt in two ways must not contradict itself.
        config = {key: value for key, value in config.items() if key not in ("rope_parameters", "torch_dtype")}
        longest = config.get("max_position_embeddings")
        config |= spec.to_hf_config(description)
        config["max_position_embeddings"] = longest or config["max_position_embeddings"]
    config["vocab_size"] = vocab_size
    name = str(dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
    if "dtype" in config:
        config["dtype"] = name
    return config


def _says(config: dict, spec: ModelSpec, description: Description) -> bool:
    """Whether a config describes this model; how long its texts may be and dropout are no part of the weights."""
    if not config:
        return False
    try:
        theirs = spec.from_hf_config(config)
    except ModelError:
        return False
    same = {"max_seq_len": description.max_seq_len, "attn_dropout": description.attn_dropout}
    return replace(theirs, vocab_size=description.vocab_size, **same) == description


def carry_files(source_dir: Path, folder: Path) -> None:
    """Copy tokenizer, template, generation settings and other small files of the source; nothing is overwritten.

    A folder without ``config.json`` is no model's own (one GGUF file among downloads, say): of its files only those
    are copied that make a tokenizer.
    """
    own = (source_dir / "config.json").is_file()
    for path in sorted(source_dir.rglob("*") if own else source_dir.glob("*")):
        relative, target = path.relative_to(source_dir), folder / path.relative_to(source_dir)
        if _stays_behind(relative) or not (own or path.name.startswith(_TOKENIZER_FILES)) or target.exists():
            continue
        if path.is_file() and path.stat().st_size <= _MAX_CARRIED_BYTES:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _stays_behind(relative: Path) -> bool:
    """Whether a file of the source is hidden, holds weights, belongs to a run, or is written anew."""
    name = relative.name
    return (
        any(part.startswith(".") for part in relative.parts)
        or relative.parts[0].startswith(_OWN_FOLDERS)
        or (len(relative.parts) > 1 and relative.parts[0] in _FOLDERS_OF_A_CHECKPOINT)
        or name.endswith(_LEFT_BEHIND)
        or name.startswith(("adapter_config", "adapter_model"))
        or str(relative) in _WRITTEN_ANEW
    )
