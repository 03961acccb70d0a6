"""Adapter files: PEFT's layout (read and written) and the layout of older checkpoints (read).

Their settings are in :mod:`torchtune.checkpoints._adapter_settings`.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._adapter_settings import (
    ADAPTER_CONFIG_FILE,
    LORA_A,
    PEFT_ALPHA,
    check_settings,
    init_from_base,
    module_of,
    rank_and_alpha_in_file,
    read_settings,
)
from torchtune.checkpoints._model_weights import (
    ModelWeights,
    groups_by_external_name,
    parent_modules,
    spec_and_description,
)
from torchtune.checkpoints._weight_files import (
    CheckpointError,
    WeightFiles,
    check_exists,
    open_weight_files,
    read_json,
)
from torchtune.models import (
    PEFT_PREFIX,
    ExpertAdapter,
    FusedAdapter,
    Group,
    ModelError,
    ModelSpec,
    WeightMap,
    WeightMapError,
    rename_prefix,
    text_prefixes,
)
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.embeddings import resize_token_embeddings
from torchtune.modules.peft import LoRA, LoRALinear, NewTokens, adapter_modules, init_from_weight
from torchtune.modules.transformer import text_decoder
from torchtune.utils import get_logger

# JSON file with the base model's name and the conversion of each file of :attr:`ModelWeights.owned_files`.
OWNED_INDEX = "adapter_conversions.json"
# Folder of the adapter in a checkpoint of merged weights.
ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
# In order of preference. Older checkpoints hold the adapter twice: as .pt, with this library's names, and as
# .safetensors, in which the rows of Qwen models are in the wrong order.
_OLDER_FILE = "adapter_model.pt"
_FILES = (_OLDER_FILE, ADAPTER_FILE, "adapter_model.bin")
# End of the name of the rows of new tokens in an adapter file, behind that of their module.
_TRAINED_ROWS = ".token_adapter.trainable_tokens_delta"


def token_tensors(weights: ModelWeights) -> dict[str, str]:
    """Map the name of trained rows in an adapter file to the name of the parameter."""
    return {
        f"{PEFT_PREFIX}{module_of(weights, name)}{_TRAINED_ROWS}": parameter
        for name, (parameter, _) in weights.new_rows.items()
    }


def _drop_tied_rows(weights: ModelWeights, tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Remove the trained rows of a tied output from the tensors of an adapter file: ``peft`` may save them twice.

    Raises:
        CheckpointError: the rows of the output differ from the embedding's.
    """
    for external, name in _tied_weights(weights).items():
        tied_rows = f"{PEFT_PREFIX}{external.removesuffix('.weight')}{_TRAINED_ROWS}"
        if name not in weights.new_rows or tied_rows not in tensors:
            continue
        value = tensors.pop(tied_rows)
        embedding_rows = tensors.get(f"{PEFT_PREFIX}{module_of(weights, name)}{_TRAINED_ROWS}")
        if embedding_rows is None or not torch.equal(value, embedding_rows):
            raise CheckpointError(
                f"{file}: its new tokens have other rows in the output than in the embedding, but the model shares "
                "them: merge the adapter into its base with peft, untied, and start from the merged model."
            )


@torch.no_grad()
def take_from_base(weights: ModelWeights, settings: Mapping[str, Any], path: Path) -> None:
    """Subtract the initial adapter of PiSSA or OLoRA from the base weights: W becomes W - scale · B0 A0, as in peft.

    B0 and A0 are computed from W: the first ``r`` singular vectors for PiSSA, the QR decomposition for OLoRA.
    ``model.adapter_init`` records it, so that a resume does not repeat it and a save writes it.

    Args:
        weights: the model's loaded weights.
        settings: settings of the adapter.
        path: file of the settings.

    Raises:
        CheckpointError: another initial adapter was subtracted before, or a layer does not support it.
    """
    init = init_from_base(settings)
    subtracted = getattr(weights.model, "adapter_init", None)
    if init == subtracted:
        return
    if subtracted is not None:
        raise CheckpointError(
            f"{path}: the base was changed for an adapter of the kind {subtracted} already: start anew."
        )
    for name, layer in splittable_layers(weights, init, path).items():
        weight = weights.full(name).float()
        remainder, _, _ = init_from_weight(weight, init, layer.rank, layer.scaling)
        weights.put(name, remainder, weight.device)
    weights.model.adapter_init = init


def adapter_init_method(model: nn.Module) -> str | None:
    """Return ``"pissa"`` or ``"olora"`` if the model's adapters are initialized from their base weights, else None."""
    for module in model.modules():
        if isinstance(module, LoRALinear) and module.start is not None:
            return module.start
    return None


def splittable_layers(weights: ModelWeights, init: str, path: Path | str) -> dict[str, LoRALinear]:
    """Return weight name -> adapted layer, for layers with adapters that may be initialized from the weight.

    Args:
        weights: weights of a model with adapters.
        init: ``"pissa"`` or ``"olora"``.
        path: prefix of error messages.

    Raises:
        CheckpointError: the weight of a layer is stacked, or fused with others in checkpoints.
    """
    layers = {}
    for module_path, module in adapter_modules(weights.model):
        is_splittable = isinstance(module, LoRALinear)
        if is_splittable:
            group = weights.adapter_groups[module_path + LORA_A]
            is_splittable = not isinstance(group.op, FusedAdapter)
        if not is_splittable:
            raise CheckpointError(
                f"{path}: init_lora_weights = '{init}' cannot be expressed for "
                f"'{module_path}.{module.adapter_params()[0]}', whose base weight has other parts here: merge the "
                "adapter into its base with peft and start from the merged model."
            )
        layers[f"{module_path}.weight"] = module
    return layers


def find_adapter(path: Path, weights: ModelWeights) -> Path:
    """Return an adapter file: ``path`` itself, or the preferred adapter file in the folder ``path``.

    Raises:
        CheckpointError: there is no adapter.
    """
    if not path.is_dir():
        check_exists(path)
        return path
    files = _adapter_files(path, weights)
    if not files:
        names = ", ".join((*_FILES, *weights.owned_files))
        raise CheckpointError(f"{path} holds no adapter ({names}): name the folder that does.")
    return files[0]


def _adapter_files(folder: Path, weights: ModelWeights) -> list[Path]:
    paths = [folder / name for name in (*_FILES, *weights.owned_files, OWNED_INDEX)]
    return [path for path in paths if path.is_file()]


def adapter_beside_base(folder: Path, weights: ModelWeights) -> Path | None:
    """Return the adapter file in a folder of base weights, as ``peft`` does; None if there is none.

    Args:
        folder: folder of base weights.
        weights: the model's weights. If the model has no adapter, an adapter file is ignored with a warning.

    Raises:
        CheckpointError: an older release wrote the folder, so the adapter may be merged into the weights.
    """
    files = _adapter_files(folder, weights)
    if not files:
        return None
    file = files[0]
    if not weights.owned:
        get_logger().warning(f"{file} is not used: the model has no adapter.")
        return None
    if file.name == _OLDER_FILE:
        raise CheckpointError(
            f"checkpoint_dir: {folder} holds {_OLDER_FILE} beside weights, as older releases wrote it after they had "
            f"merged it into them: set adapter_checkpoint to {_OLDER_FILE} if the weights are those of the base model, "
            "or move the adapter's files away to train a new one on the merged weights."
        )
    get_logger().info(f"The adapter starts from {file}.")
    return file


def load_adapter(weights: ModelWeights, file: Path, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Fill the adapter parameters of a model.

    Args:
        weights: the model's weights, with base weights filled.
        file: adapter file with this library's names or PEFT's (for the text model or for a composite model that
            contains it). For one of :attr:`ModelWeights.owned_files`, all of them are read from its folder.
        device: device for parameters on the meta device.
        dtype: dtype for parameters on the meta device; unchanged by default.

    Raises:
        CheckpointError: the adapter has other target modules, another rank or another alpha.
    """
    expected = weights.owned - _load_owned_files(weights, file.parent, device, dtype)
    expected.update(weights.trained_whole)  # in PEFT's layout, these are in the adapter file, too (modules_to_save)
    if not weights.owned:
        raise CheckpointError(f"{file}: the model has no adapter to put it into: use a lora_* builder or a converter.")
    if file.name in (*weights.owned_files, OWNED_INDEX):
        if not expected:
            return  # all parameters were in such files, and there is no other one
        file = file.with_name(ADAPTER_FILE)
    settings_file = file.with_name(ADAPTER_CONFIG_FILE)
    settings = check_settings(weights, settings_file)
    loaded = set()
    # All of it is read first, so that nothing is loaded from an adapter of another model.
    for name, tensor in list(_read_adapter(weights, open_weight_files([file]), file, settings)):
        if name not in expected:
            raise CheckpointError(
                f"{file}: it holds '{name}', which the model in the run's config does not adapt: adapt the layers that "
                f"its {ADAPTER_CONFIG_FILE} lists."
            )
        weights.load_value(name, tensor, file, device, dtype)
        loaded.add(name)
    missing = sorted(expected - loaded)
    if missing:
        omitted = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if missing[0] in weights.trained_whole:
            raise CheckpointError(
                f"{file} lacks '{missing[0]}'{omitted}, which the model in the run's config trains whole: leave out of "
                f"train_modules what is not in modules_to_save of its {ADAPTER_CONFIG_FILE}, or merge the adapter into "
                "its base and start from the merged model."
            )
        raise CheckpointError(
            f"{file} lacks '{missing[0]}'{omitted}, which the model in the run's config adapts: adapt the layers that "
            f"its {ADAPTER_CONFIG_FILE} lists."
        )
    # For PiSSA and OLoRA, whose adapter belongs to the base without its initial adapter; nothing for others.
    take_from_base(weights, settings, settings_file)


def add_new_tokens(model: nn.Module, file: Path) -> None:
    """Enlarge the vocabulary of a model for an adapter that was trained together with the rows of new tokens.

    Args:
        model: model with loaded base weights. Unchanged if it has the rows already, or if the adapter trains none. If
            its embedding is trained whole, it gets the rows that the adapter's has.
        file: file of the adapter.

    Raises:
        CheckpointError: the rows are not the next ones of the model's vocabulary, or the model cannot train rows
            separately.
    """
    settings = file.with_name(ADAPTER_CONFIG_FILE)
    trained = read_settings(settings).get("trainable_token_indices") if settings.is_file() else None
    weights = ModelWeights(model)
    if not trained:
        _grow_trained_embedding(weights, file)
        return
    if weights.new_rows:
        return
    ids = trained
    if isinstance(trained, dict):  # ids by module; all modules have the same ones
        ids = next(iter(trained.values()))
    are_ids = isinstance(ids, list) and all(type(token_id) is int for token_id in ids)
    files = open_weight_files([file])
    tensors = [name for name in files.names() if name.endswith(".trainable_tokens_delta")]
    if not are_ids or not tensors:
        return  # load_adapter raises
    decoder = text_decoder(model)
    rows = decoder.tok_embeddings.weight.shape[0]
    needed = max(ids) + 1
    first = needed - len(ids)
    are_consecutive = ids == list(range(first, needed))
    have_values = files.shape(tensors[0])[0] == len(ids)  # a tied output has the same rows
    # A gap would have rows without values, but the base may have some of the new rows already, untrained.
    continues_vocabulary = first <= rows <= needed
    if not (are_consecutive and have_values and continues_vocabulary):
        raise CheckpointError(
            f"{settings}: trainable_token_indices are the {len(ids)} rows from {min(ids)} to {max(ids)}, which do not "
            f"continue the vocabulary of the base with its {rows} rows: use the base that the adapter was trained on, "
            "or merge the adapter into its base with peft and start from the merged model."
        )
    try:
        NewTokens.grow(decoder, needed, len(ids))
    except ConversionError as error:
        raise CheckpointError(f"{settings} has {len(ids)} new tokens, which this model cannot get; {error}") from error


def _grow_trained_embedding(weights: ModelWeights, file: Path) -> None:
    """Enlarge the vocabulary if an adapter brings a larger embedding, trained whole."""
    decoder = text_decoder(weights.model)
    if not any(name.endswith("tok_embeddings.weight") for name in weights.trained_whole):
        return
    # A sharded embedding cannot grow; its shape is then compared with the file's, as for any weight.
    is_sharded = hasattr(decoder.tok_embeddings.weight, "device_mesh")
    files = open_weight_files([file])
    embeddings = [name for name in files.names() if name.endswith("embed_tokens.weight")]
    if not embeddings or is_sharded:
        return
    num_rows = files.shape(embeddings[0])[0]
    if num_rows > decoder.tok_embeddings.weight.shape[0]:
        resize_token_embeddings(decoder, num_rows)


def _load_owned_files(weights: ModelWeights, folder: Path, device: torch.device, dtype: torch.dtype | None) -> set[str]:
    """Fill the parameters of :attr:`ModelWeights.owned_files` from a folder; return their names.

    Args:
        weights: weights of a model with conversions.
        folder: folder of the files.
        device: device for parameters on the meta device.
        dtype: dtype for parameters on the meta device; None leaves it unchanged.

    Raises:
        CheckpointError: a file is missing, holds other parameters, or belongs to a conversion that the model lacks.
    """
    index_file = folder / OWNED_INDEX
    index = read_json(index_file) if index_file.is_file() else {}  # an adapter in PEFT's layout alone has no index
    saved_conversions = index.get("conversions", {})
    if not isinstance(saved_conversions, dict):
        raise CheckpointError(f"{index_file}: 'conversions' is not an object: save the checkpoint again.")
    # Without a conversion that was saved, the model would run with other weights than those that were trained.
    unused = sorted(saved_conversions.keys() - weights.owned_files.keys())
    if unused:
        raise CheckpointError(
            f"{folder / unused[0]} holds parameters of the conversion {saved_conversions[unused[0]]}, which the model "
            "does not have: add it to model_converters, or give it to torchtune.load as adapter."
        )
    loaded = set()
    for file, names in weights.owned_files.items():
        path = folder / file
        if not path.is_file():
            raise CheckpointError(
                f"{folder} lacks {file}, the parameters of a conversion of this model: give a folder that was saved "
                "with it, or leave the conversion out."
            )
        files = open_weight_files([path])
        mismatched = sorted(set(files.names()).symmetric_difference(names))
        if mismatched:
            verb = "lacks" if mismatched[0] in names else "holds"
            raise CheckpointError(
                f"{path} {verb} '{mismatched[0]}', unlike the model: make the conversion's settings those that it was "
                "saved with."
            )
        for name in names:
            weights.load_value(name, files.read(name), path, device, dtype)
        loaded.update(names)
    return loaded


def _read_adapter(
    weights: ModelWeights, files: WeightFiles, file: Path, settings: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an adapter file with this library's names and row order."""
    tensors = dict(files.stream())
    spec, description = weights.spec_and_description
    if not any(name.startswith(PEFT_PREFIX) for name in tensors):
        # An older checkpoint has this library's names of its time: some modules were renamed since.
        renamed_modules = {}
        for group in spec.weight_maps.get("earlier", WeightMap(())).groups(description):
            former_module = group.external[0].removesuffix("weight")
            renamed_modules[former_module] = group.tune[0].removesuffix("weight")
        for name, tensor in tensors.items():
            yield rename_prefix(name, renamed_modules), tensor
        return
    _refuse_embedding_adapter(tensors, file)
    # An adapter of a model of text and images has the text decoder's names behind a prefix.
    prefixes = _text_decoder_prefixes(spec, tensors)
    tensors = {rename_prefix(name, prefixes): tensor for name, tensor in tensors.items()}
    new_rows = token_tensors(weights)
    _drop_tied_rows(weights, tensors, file)
    for name, tensor in tensors.items():
        if name in new_rows:
            yield new_rows[name], tensor
    weight_map = _adapter_weight_map(spec, tensors)
    groups = groups_by_external_name(weight_map, description)
    _check_tying(weights, tensors, settings, file)
    try:
        # Modules trained whole come first, with the names of the base model; the other tensors are adapters.
        trained = {}
        for name in list(tensors):
            external = name.removeprefix(PEFT_PREFIX)
            if _is_trained_whole(weights, external):
                trained[external] = tensors.pop(name)
        yield from weights.module_map.to_tune(trained.items(), description, partial=True)
        adapter = {}
        for name, tensor in tensors.items():
            # The model has the base weights already: they are only compared.
            if name not in new_rows and not _is_base_weight(weights, name, tensor, file):
                adapter[name] = tensor
        _expand_fused_adapters(weights, adapter, groups)
        for name, tensor in adapter.items():
            if name in groups:
                _check_rank(weights, groups[name], name, tensor, file)
        yield from weight_map.to_tune(adapter.items(), description, partial=True)
    except (WeightMapError, ModelError) as error:
        raise CheckpointError(f"{file}: {str(error).rstrip('.')}: it is an adapter of another model.") from error


def _refuse_embedding_adapter(names: Iterable[str], file: Path) -> None:
    """Raise ``CheckpointError`` if an adapter file has a LoRA adapter of an embedding, which ``peft`` names so."""
    for name in names:
        if ".lora_embedding_" in name:
            raise CheckpointError(
                f"{file}: it holds '{name}', and LoRA on an embedding is not supported: merge the adapter into its "
                "base with peft and start from the merged model."
            )


def _check_tying(weights: ModelWeights, tensors: Collection[str], settings: Mapping[str, Any], file: Path) -> None:
    """Raise ``CheckpointError`` if ``peft`` unties weights that the model ties: it trained one of them alone."""
    if settings.get("ensure_weight_tying"):
        return
    for tied, source in _tied_weights(weights).items():
        if source not in weights.trained_whole:
            continue
        original = next(name for name, group in weights.module_groups.items() if source in group.tune)
        has_original = f"{PEFT_PREFIX}{original}" in tensors
        has_tied = f"{PEFT_PREFIX}{tied}" in tensors
        if has_original != has_tied:
            single = original if has_original else tied
            raise CheckpointError(
                f"{file}: it holds '{single}' alone, which peft unties from the other of '{original}' and '{tied}', "
                "and the model ties them: train it in peft with ensure_weight_tying=True, or untie the base."
            )


def _tied_weights(weights: ModelWeights) -> dict[str, str]:
    """Return the name in ``transformers`` of a weight that the model ties -> name of the weight it is tied to."""
    _, description = weights.spec_and_description
    tied = {}
    for tie in weights.module_map.tied:
        if getattr(description, tie.when):  # a field of the description: most families have tied and untied models
            tied[tie.external] = tie.source
    return tied


def _is_trained_whole(weights: ModelWeights, external: str) -> bool:
    """Return whether a tensor with the name ``external`` in ``transformers`` holds weights that are trained whole."""
    source = _tied_weights(weights).get(external)
    if source is not None:
        return source in weights.trained_whole
    group = weights.module_groups.get(external)
    return group is not None and set(group.tune).issubset(weights.trained_whole)


def _adapter_weight_map(spec: ModelSpec, names: Collection[str]) -> WeightMap:
    """Return the weight map for an adapter's names; experts have one tensor each, or one tensor for all."""
    is_fused = any(".experts.lora_" in name for name in names) and "hf_fused" in spec.weight_maps
    name_format = "hf_fused" if is_fused else "hf"
    return spec.weight_map(name_format).peft()


def _text_decoder_prefixes(spec: ModelSpec, names: Collection[str]) -> dict[str, str]:
    """Map adapter prefixes of a composite model to prefixes of its text decoder; empty if the model is composite."""
    if spec.builder is not None:
        return {}
    prefixes = text_prefixes(name.removeprefix(PEFT_PREFIX) for name in names)
    return {PEFT_PREFIX + composite: PEFT_PREFIX + text for text, composite in prefixes.items()}


def _expand_fused_adapters(
    weights: ModelWeights, tensors: dict[str, torch.Tensor], groups: Mapping[str, Group]
) -> None:
    """Bring adapters of fused projections, if they have the model's rank, into block-diagonal form, in place.

    The model has an adapter of rank r for each of the n projections, and the weight map expects them in files as one
    adapter of the fused projection, of rank n · r: all A below each other, and the B as a block-diagonal matrix. An
    adapter that ``peft`` trained on the fused projection has the rank r: its A is repeated n times, and its B divided.
    Adapters of another rank stay as they are; those of rank n · r have the form already.
    """
    for name in list(tensors):
        group = groups.get(name)
        if group is None or name != group.external[0]:
            continue  # once for each group, at its A
        count = len(group.tune) // 2  # each projection has an A and a B
        if count < 2 or not isinstance(group.op, FusedAdapter | ExpertAdapter):
            continue
        pair = [tensors[external] for external in group.external if external in tensors]
        if len(pair) != 2 or not all(tune in weights.parameters for tune in group.tune):
            continue  # incomplete, or of layers without adapters: the caller raises
        expected_a, expected_b = group.to_external([weights.specs[tune] for tune in group.tune])
        lora_a, lora_b = pair  # [r, in] and [out, r]; experts have their dimension behind
        ranks = (lora_a.shape[0] * count, lora_b.shape[1] * count)
        if ranks == (expected_a.shape[0], expected_b.shape[1]):
            spread_pair = group.op.to_block_diagonal(pair, group.description)
            tensors.update(zip(group.external, spread_pair, strict=True))


def _is_base_weight(weights: ModelWeights, name: str, tensor: torch.Tensor, file: Path) -> bool:
    """Return whether a tensor of an adapter file is a base weight.

    ``peft`` saves the weight of an adapted output layer, and embedding and output of a resized vocabulary.

    Raises:
        CheckpointError: it is a base weight that differs from the model's.
    """
    description = weights.spec_and_description[1]
    # peft wraps a module with trained rows or an adapter, and the wrapper adds a component to the name of its weight.
    external = name.removeprefix(PEFT_PREFIX).replace(".token_adapter.", ".").replace(".base_layer.", ".")
    tied = _tied_weights(weights)
    if external in tied:
        values = [(tied[external], tensor)]
    elif external in weights.module_groups:
        values = list(weights.module_map.to_tune([(external, tensor)], description, partial=True))
    else:
        return False
    for weight_name, value in values:
        if value.shape != weights.specs[weight_name].shape or not weights.equals(weight_name, value):
            raise CheckpointError(
                f"{file}: it brings '{name}', which differs from the model's: if it was trained beside the adapter "
                "(modules_to_save), name its module in train_modules of torchtune.modules.peft.LoRA; else it was "
                "trained together with a changed base, so merge it into that base with peft and start from the merged "
                "model."
            )
    return True


def _check_rank(weights: ModelWeights, group: Group, name: str, tensor: torch.Tensor, file: Path) -> None:
    """Raise on a shape that does not fit, before rows are reordered."""
    if not all(tune in weights.parameters for tune in group.tune):
        return  # the caller raises with the list of layers without adapters
    specs = group.to_external([weights.specs[tune] for tune in group.tune])
    expected = specs[group.external.index(name)].shape
    if tensor.shape != expected:
        raise CheckpointError(
            f"{file}: the tensor '{name}' has the shape {list(tensor.shape)} where the model needs {list(expected)}: "
            "the adapter is of another rank or of another model."
        )


def has_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter in PEFT's layout.

    Example:
        >>> torchtune.checkpoints.has_adapter(checkpoint)
        False
    """
    return (folder / ADAPTER_FILE).is_file() and (folder / ADAPTER_CONFIG_FILE).is_file()


def has_conversion_files(folder: Path) -> bool:
    """Return whether a folder holds parameters of conversions, with a file for each.

    Example:
        >>> torchtune.checkpoints.has_conversion_files(checkpoint)
        False
    """
    return (folder / OWNED_INDEX).is_file()


def base_of_adapter(folder: Path) -> str:
    """Return the folder or repository of the base model, which the files of an adapter name.

    Raises:
        CheckpointError: they name none.

    Example:
        >>> adapter = torchtune.modules.peft.LoRA(rank=2)
        >>> model, _ = torchtune.load(checkpoint, adapter=adapter, dtype="fp32", device="cpu")
        >>> saved = torchtune.save(model, folder / "adapter")
        >>> torchtune.checkpoints.base_of_adapter(saved) == str(checkpoint)
        True
    """
    file = folder / (ADAPTER_CONFIG_FILE if has_adapter(folder) else OWNED_INDEX)
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{file} names no base (base_model_name_or_path): load the base with adapter={folder}.")
    return base


def adapter_folder(folder: Path) -> Path:
    """Return the folder of the adapter: ``folder``, or ``adapter`` in a checkpoint of merged weights.

    Raises:
        CheckpointError: neither contains an adapter in PEFT's layout.
    """
    for candidate in (folder, folder / ADAPTER_DIR):
        if has_adapter(candidate) or has_conversion_files(candidate):
            return candidate
    raise CheckpointError(
        f"{folder}: there is no {ADAPTER_FILE} with an {ADAPTER_CONFIG_FILE}: give an adapter's folder."
    )


def num_classes_of_adapter(folder: Path) -> int:
    """Return the number of outputs of the classification head that an adapter brings whole; 0 if it brings none.

    Example:
        >>> adapter = torchtune.modules.peft.LoRA(rank=2)
        >>> model, _ = torchtune.load(checkpoint, adapter=adapter, dtype="fp32", device="cpu")
        >>> torchtune.checkpoints.num_classes_of_adapter(torchtune.save(model, folder / "adapter"))
        0
    """
    if read_settings(folder / ADAPTER_CONFIG_FILE).get("task_type") != "SEQ_CLS":
        return 0
    files = open_weight_files([folder / ADAPTER_FILE])
    name = f"{PEFT_PREFIX}score.weight"
    return files.shape(name)[0] if name in files.names() else 0


def adapter_conversion(model: nn.Module, folder: Path) -> LoRA:
    """Return the conversion that adds the adapter layers of a PEFT folder to ``model``.

    Args:
        model: model without adapters, on the meta device or materialized.
        folder: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        CheckpointError: a file is missing, or the adapter belongs to another model.
    """
    file = folder / ADAPTER_FILE
    settings = read_settings(folder / ADAPTER_CONFIG_FILE)
    all_names = open_weight_files([file]).names()
    _refuse_embedding_adapter(all_names, file)
    # Every adapted layer has one A, whatever else it has: B, and a magnitude with DoRA.
    names = [name for name in all_names if ".lora_A." in name]
    spec, description = spec_and_description(model)
    prefixes = _text_decoder_prefixes(spec, names)
    names = [rename_prefix(name, prefixes) for name in names]
    groups = groups_by_external_name(_adapter_weight_map(spec, names), description)
    if not names or "r" not in settings:
        raise CheckpointError(f"{folder}: there is no LoRA adapter in it: give the folder that a recipe or peft wrote.")
    base_rank = settings["r"]
    base_alpha = settings.get("lora_alpha", PEFT_ALPHA)
    layers = set()
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    for name in names:
        if name not in groups:
            raise CheckpointError(f"{file}: it holds '{name}', for which the model has no layer: it is of another one.")
        rank, alpha = rank_and_alpha_in_file(groups[name], settings)
        # The adapter of a fused projection belongs to several of our layers.
        for tune_name in groups[name].tune:
            path = tune_name.partition(".lora_")[0]
            layers.add(path)
            # Patterns of LoRA are regular expressions; these ones select one layer each.
            if rank != base_rank and rank == int(rank):  # load_adapter raises on a fraction, because the shapes differ
                rank_pattern[re.escape(path)] = int(rank)
            if not math.isclose(alpha, base_alpha):
                alpha_pattern[re.escape(path)] = alpha
    return LoRA(
        rank=base_rank,
        alpha=base_alpha,
        target_modules=sorted(layers),
        use_dora=bool(settings.get("use_dora")),
        use_rslora=bool(settings.get("use_rslora")),
        train_modules=_modules_trained_whole(
            ModelWeights(model), [rename_prefix(name, prefixes) for name in all_names], settings
        ),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
    )


def _modules_trained_whole(weights: ModelWeights, names: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the paths of our modules that an adapter brings whole (``modules_to_save``).

    Args:
        weights: weights of the model.
        names: names of the tensors in the adapter file.
        settings: settings of the adapter.
    """
    saved = tuple(settings.get("modules_to_save") or ())
    if not saved:
        return []
    tied = _tied_weights(weights)
    modules = set()
    for name in names:
        external = name.removeprefix(PEFT_PREFIX)
        # A setting may name the module of the weight, or one around it, by the end of its path, as peft compares them.
        if not any(parent.endswith(saved) for parent in parent_modules(external)):
            continue
        if external in tied:
            weight_names = [tied[external]]
        elif external in weights.module_groups:
            weight_names = weights.module_groups[external].tune
        else:
            continue  # the model has no such weight: load_adapter raises
        modules.update(weight_name.rpartition(".")[0] for weight_name in weight_names)
    return sorted(modules)


def adapted_copy(model: nn.Module, folder: Path) -> nn.Module:
    """Copy a model, with a LoRA adapter; the copy shares the parameters that the adapter does not change.

    Args:
        model: a loaded decoder without adapters.
        folder: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        CheckpointError: files are missing or damaged, or the adapter is for another model.

    Example:
        >>> model, _ = torchtune.load(checkpoint, dtype="fp32", device="cpu")
        >>> lora = torchtune.modules.peft.LoRA(rank=2)
        >>> adapted, _ = torchtune.load(checkpoint, adapter=lora, dtype="fp32", device="cpu")
        >>> copy = torchtune.checkpoints.adapted_copy(model, torchtune.save(adapted, folder / "adapter"))
        >>> copy.output.weight is model.output.weight
        True
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    copy = deepcopy(model, shared)
    apply_conversions(copy, [adapter_conversion(copy, folder)])
    for name in ModelWeights(copy).trained_whole:
        path, _, leaf = name.rpartition(".")
        parameter_of_copy = nn.Parameter(copy.get_parameter(name).detach().clone())
        copy.get_submodule(path).register_parameter(leaf, parameter_of_copy)
    if init_from_base(read_settings(folder / ADAPTER_CONFIG_FILE)) is not None:
        # PiSSA and OLoRA subtract the initial adapter from the base weights, which the model keeps.
        for _, layer in adapter_modules(copy):
            layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    add_new_tokens(copy, folder / ADAPTER_FILE)
    load_adapter(ModelWeights(copy), folder / ADAPTER_FILE, model.tok_embeddings.weight.device)
    return copy.eval()
