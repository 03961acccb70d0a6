"""Contents of a checkpoint, and the check that they include every trained parameter."""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._model_weights import ModelWeights
from torchtune.modules.peft import has_adapters

Content = Literal["model", "adapter", "merged"]
# Contents for one model, or for several by name.
Contents = Content | Sequence[Content] | Mapping[str, Content | Sequence[Content]]
_CHOICES = ({"model"}, {"adapter"}, {"merged"}, {"adapter", "merged"})


def checkpoint_contents(models: nn.Module, *, merge: bool) -> Contents:
    """Return the contents of a run's checkpoints: adapters, or all weights of a model without adapters.

    Args:
        models: the model, or several by name (``torch.nn.ModuleDict``).
        merge: also save models with adapters with the adapters merged into the base weights.

    Returns:
        The argument ``contents`` of :meth:`CheckpointStore.save`.

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
    """Return the contents for the model ``name``; see :meth:`CheckpointStore.save`.

    Raises:
        CheckpointError: ``contents`` lacks the model, or is not a valid choice.
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


def _written_names(weights: ModelWeights, contents: frozenset[str]) -> set[str]:
    """Names of the parameters that a save with these contents preserves."""
    spec, description = weights.identity
    written = weights.adapter_names(merge="merged" in contents) if contents & {"adapter", "merged"} else set()
    if contents & {"model", "merged"}:
        named = {name for group in spec.weight_map("hf").groups(description) for name in group.tune}
        written |= named & weights.base | weights.inside
    return written


def check_contents(weights: ModelWeights, contents: frozenset[str], *, resumable: bool = True) -> None:
    """Check that a save with these contents writes all trained parameters.

    Args:
        weights: the model's weights, before training or at a save.
        contents: from :func:`contents_of`.
        resumable: whether a resume reads the checkpoint; for a model with an adapter it reads only the adapter.

    Raises:
        CheckpointError: a trained parameter would not be written, or a weight is not found under its name.
    """
    weights.check_names(exported=bool(contents & {"model", "merged"}))
    if (init := getattr(weights.model, "adapter_init", None)) and contents == {"model"}:
        raise CheckpointError(
            f"model: its base lacks what the adapter started with (init_lora_weights = '{init}'), so it is not saved "
            f"without the adapter: {_WITH_ADAPTER}."
        )
    if resumable and "merged" in contents and "adapter" not in contents:
        raise CheckpointError(f"contents: a resume needs the adapter beside the merged weights: {_WITH_ADAPTER}.")
    written = _written_names(weights, contents)
    if resumable and "adapter" in contents:
        written &= _written_names(weights, frozenset({"adapter"}))
    lost = [name for name in weights.trained if name not in written]
    if not lost:
        return
    if lost[0] in _written_names(weights, frozenset({"adapter"})):
        what = "merged weights" if "merged" in contents else "the base weights alone"
        advice = (
            'give its conversion a method merged(name, weight, model), or save with contents="adapter" '
            "(save_adapter_weights_only=True)"
            if "merged" in contents
            else "train adapters with lora_finetune_single_device or lora_finetune_distributed (in code of your own: "
            f"{_WITH_ADAPTER}), or take the adapter out of the model"
        )
    elif lost[0] in _written_names(weights, frozenset({"model"})):
        what = "the adapter alone"
        advice = "freeze it, or train it with full_finetune_single_device or full_finetune_distributed without adapters"
    else:
        what = "only what has a name in Hugging Face's or PEFT's format, and it has none"
        advice = "name it in owned_parameters(model) of the conversion that adds it, freeze it, or leave that out"
    more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
    raise CheckpointError(f"model: '{lost[0]}'{more} is trained, but checkpoints would hold {what}: {advice}.")


_WITH_ADAPTER = 'save with contents="adapter" or ("adapter", "merged")'
