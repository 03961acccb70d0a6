"""What a save writes of a model, and whether that is everything that was trained."""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from torchtune.modules.conversion import complete_conversions
from torchtune.modules.peft import has_adapters
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._full_weights import FullWeights
from torchtune.training.checkpointing._load import check_names, identity
from torchtune.training.checkpointing._owned_files import owned_files
from torchtune.training.checkpointing._peft_settings import trained_rows

Content = Literal["model", "adapter", "merged"]
# Of one model, or of models by name.
Contents = Content | Sequence[Content] | Mapping[str, Content | Sequence[Content]]
_CHOICES = ({"model"}, {"adapter"}, {"merged"}, {"adapter", "merged"})


def checkpoint_contents(models: nn.Module, *, merge: bool) -> Contents:
    """What a checkpoint holds of what a run trains: adapters, or all weights of a model that has none.

    Args:
        models: the model, or several by name (``torch.nn.ModuleDict``).
        merge: whether a model with adapters is also saved with them merged into its weights.

    Returns:
        for :meth:`CheckpointStore.save`.

    Example:
        >>> torchtune.training.checkpoint_contents(model, merge=True)
        'model'
    """
    if isinstance(models, nn.ModuleDict):
        return {name: checkpoint_contents(model, merge=merge) for name, model in models.items()}
    if not has_adapters(models):
        return "model"
    return ("adapter", "merged") if merge else "adapter"


def contents_of(contents: Contents, name: str) -> frozenset[str]:
    """What is written of the model called ``name``; see :meth:`CheckpointStore.save`.

    Raises:
        CheckpointError: ``contents`` says nothing of it, or no choice that can be saved.
    """
    if isinstance(contents, Mapping):
        if name not in contents:
            raise CheckpointError(f"contents: nothing is said of the model '{name}': name it.")
        contents = contents[name]
    chosen = frozenset([contents] if isinstance(contents, str) else contents)
    if chosen not in _CHOICES:
        raise CheckpointError(
            f'contents: {contents!r} cannot be saved: choose "model", "adapter", "merged" or ("adapter", "merged").'
        )
    return chosen


def written_names(model: nn.Module, contents: frozenset[str]) -> set[str]:
    """Names of the parameters that a save with these contents preserves.

    Args:
        model: built by :mod:`torchtune.models`, on any device.
        contents: from :func:`contents_of`; merging preserves only the parameters of conversions that can merge.

    Raises:
        CheckpointError: the model has no ``ModelSpec``.
    """
    spec, description = identity(model)
    weight_map, weights = spec.weight_map("hf"), FullWeights(model)
    written: set[str] = set()
    if contents & {"model", "merged"}:
        base = {name for group in weight_map.groups(description) for name in group.tune}
        written |= {part for name in weights.base & base for part in weights.parameters(name)}
    if contents & {"adapter", "merged"}:
        adapter = {name for group in weight_map.peft().groups(description) for name in group.tune}
        adapter |= {rows for rows, _ in trained_rows(model).values()}
        adapter |= {name for names in owned_files(model).values() for name in names}
        merge = "merged" in contents
        kept = [c.owned_parameters(model) for c in complete_conversions(model) if c.can_merge or not merge]
        written |= adapter & set().union(*kept)
    return written


def check_contents(model: nn.Module, contents: frozenset[str], *, resumable: bool = True) -> None:
    """Compare the trained parameters with those that a save with these contents writes.

    A parameter is trained if it requires a gradient, or if a hook of a conversion changes it (``moved_parameters``).

    Args:
        model: before training, or when it is saved.
        contents: from :func:`contents_of`.
        resumable: whether a resume reads the checkpoint: of a model with an adapter it reads the adapter alone.

    Raises:
        CheckpointError: a trained parameter would not be written, or a weight has lost its name.
    """
    check_names(model, exported=bool(contents & {"model", "merged"}))
    moved = set().union(*(conversion.moved_parameters(model) for conversion in complete_conversions(model)))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad or name in moved]
    if (init := getattr(model, "adapter_init", None)) and contents == {"model"}:
        raise CheckpointError(
            f"model: its base lacks what the adapter started with (init_lora_weights = '{init}'), so it is not saved "
            f"without the adapter: {_WITH_ADAPTER}."
        )
    if resumable and "merged" in contents and "adapter" not in contents:
        raise CheckpointError(f"contents: a resume needs the adapter beside the merged weights: {_WITH_ADAPTER}.")
    written = written_names(model, contents)
    if resumable and "adapter" in contents:
        written &= written_names(model, frozenset({"adapter"}))
    lost = [name for name in trained if name not in written]
    if not lost:
        return
    if lost[0] in written_names(model, frozenset({"adapter"})):
        what = "merged weights" if "merged" in contents else "the base weights alone"
        advice = (
            'give its conversion a method merged(name, weight, model), or save with contents="adapter" '
            "(save_adapter_weights_only=True)"
            if "merged" in contents
            else "train adapters with lora_finetune_single_device or lora_finetune_distributed (in code of your own: "
            f"{_WITH_ADAPTER}), or take the adapter out of the model"
        )
    elif lost[0] in written_names(model, frozenset({"model"})):
        what = "the adapter alone"
        advice = "freeze it, or train it with full_finetune_single_device or full_finetune_distributed without adapters"
    else:
        what = "only what has a name in Hugging Face's or PEFT's format, and it has none"
        advice = "name it in owned_parameters(model) of the conversion that adds it, freeze it, or leave that out"
    more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
    raise CheckpointError(f"model: '{lost[0]}'{more} is trained, but checkpoints would hold {what}: {advice}.")


_WITH_ADAPTER = 'save with contents="adapter" or ("adapter", "merged")'
