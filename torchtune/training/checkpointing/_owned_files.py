"""Files of parameters that conversions own and PEFT's layout has no names for: one for each class of conversions."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.modules.conversion import complete_conversions, get_conversions
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._load import load_tensor, read_json
from torchtune.training.checkpointing._open_source import open_source
from torchtune.training.checkpointing._peft_settings import trained_rows
from torchtune.training.checkpointing._safetensors_file import Entry, TensorFile, TensorSlice, tensor_file
from torchtune.training.parallel._ranks import Ranks
from torchtune.training.parallel._shards import LocalShard

# Names the base, and the conversion of each file.
OWNED_INDEX = "adapter_conversions.json"


def owned_files(model: nn.Module) -> dict[str, list[str]]:
    """The names of the files, ``adapter_<class>.safetensors``, and of the parameters in each."""
    placed, files = {rows for rows, _ in trained_rows(model).values()}, {}
    conversions = list(zip(get_conversions(model), complete_conversions(model), strict=True))
    for _, conversion in conversions:
        placed |= conversion.owned_parameters(model) if conversion.peft_config(model) else set()
    for given, conversion in conversions:
        if names := sorted(conversion.owned_parameters(model) - placed):
            files.setdefault(f"adapter_{type(given).__name__}.safetensors", []).extend(names)
            placed.update(names)
    return files


def owned_exports(model: nn.Module, ranks: Ranks, base_name: str, folder: str) -> tuple[list[TensorFile], Any]:
    """The files to write, and the contents of their index; ``None`` if there are none.

    Args:
        model: sharded or not.
        ranks: every rank makes its own shard.
        base_name: repository or folder of the base weights.
        folder: of the files within the checkpoint, with a slash at its end.
    """
    files, turn = [], 0
    for file, names in owned_files(model).items():
        entries = []
        for name in names:
            shard = LocalShard.of(model.get_parameter(name), ranks, turn)
            entries.append(Entry({name: shard.spec}, partial(slices_of, name, shard)))
            turn += 1
        files.append(tensor_file(folder + file, entries))
    if not files:
        return [], None
    kinds = {f"adapter_{type(one).__name__}.safetensors": _path(one) for one in get_conversions(model)}
    written = {name: kinds[name] for name in owned_files(model)}
    return files, {"base_model_name_or_path": base_name, "conversions": written}


def slices_of(name: str, shard: LocalShard) -> list[TensorSlice]:
    """The slices of a tensor that this rank writes."""
    return [TensorSlice.of(name, shard.data, [part.start for part in shard.slices])] if shard.is_writer else []


def _path(conversion: object) -> str:
    return f"{type(conversion).__module__}.{type(conversion).__qualname__}"


def load_owned(model: nn.Module, folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> set[str]:
    """Fill the parameters of :func:`owned_files` from a folder; return their names.

    Args:
        model: with conversions, on the meta device or real, sharded or not.
        folder: with the files.
        device: where parameters on the meta device become real.
        dtype: of these; their own by default.

    Raises:
        CheckpointError: a file is missing, holds other parameters, or belongs to a conversion that the model lacks.
    """
    files, loaded = owned_files(model), set()
    index = read_json(folder / OWNED_INDEX) if (folder / OWNED_INDEX).is_file() else {}
    saved = index.get("conversions", {})
    if not isinstance(saved, dict):
        raise CheckpointError(f"{folder / OWNED_INDEX}: 'conversions' is no object: save the checkpoint again.")
    if unused := sorted(saved.keys() - files.keys()):
        raise CheckpointError(
            f"{folder / unused[0]} holds parameters of the conversion {saved[unused[0]]}, which the model does not "
            "have: add it to model_converters, or give it to torchtune.load as adapter."
        )
    for file, names in files.items():
        path = folder / file
        if not path.is_file():
            raise CheckpointError(
                f"{folder} lacks {file}, the parameters of a conversion of this model: give a folder that was saved "
                "with it, or leave the conversion out."
            )
        source = open_source([path])
        if other := sorted(set(source.names()).symmetric_difference(names)):
            how = "lacks" if other[0] in names else "holds"
            raise CheckpointError(
                f"{path} {how} '{other[0]}', unlike the model: make the conversion's settings those that it was saved "
                "with."
            )
        for name in names:
            load_tensor(model, name, source.read(name), path, device, dtype)
        loaded.update(names)
    return loaded
