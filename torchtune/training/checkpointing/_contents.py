"""Whether a save writes everything that was trained."""

from torch import nn

from torchtune.modules.conversion import complete_conversions
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._full_weights import FullWeights
from torchtune.training.checkpointing._load import identity
from torchtune.training.checkpointing._peft_settings import trained_rows


def written_names(model: nn.Module, *, adapter_only: bool = False, merge: bool = False) -> set[str]:
    """Names of the parameters whose values a save of these contents keeps.

    Args:
        model: built by :mod:`torchtune.models`, on any device.
        adapter_only: as for ``save``.
        merge: as for ``save``; the parameters of a conversion that cannot merge are not kept.

    Raises:
        CheckpointError: the model does not say what it is.
    """
    spec, description = identity(model)
    weight_map, weights = spec.weight_map("hf"), FullWeights(model)
    written: set[str] = set()
    if not adapter_only:
        base = {name for group in weight_map.groups(description) for name in group.tune}
        written |= {part for name in weights.base & base for part in weights.parameters(name)}
    if adapter_only or merge:
        adapter = {name for group in weight_map.peft().groups(description) for name in group.tune}
        adapter |= {rows for rows, _ in trained_rows(model).values()}
        kept = [c.owned_parameters(model) for c in complete_conversions(model) if c.can_merge or not merge]
        written |= adapter & set().union(*kept)
    return written


def check_contents(model: nn.Module, *, adapter_only: bool = False, merge: bool = False) -> None:
    """Compare the trained parameters with those that a save of these contents writes.

    Trained is what requires a gradient, and what hooks of a conversion change (``moved_parameters``).

    Args:
        model: before training, or when it is saved.
        adapter_only: as for ``save``.
        merge: as for ``save``.

    Raises:
        CheckpointError: a trained parameter would not be written.
    """
    moved = set().union(*(conversion.moved_parameters(model) for conversion in complete_conversions(model)))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad or name in moved]
    if (init := getattr(model, "adapter_init", None)) and not (adapter_only or merge):
        raise CheckpointError(
            f"model: its base lacks what the adapter started with (init_lora_weights = '{init}'), so it is not saved "
            "without the adapter: save with adapter_only=True or merge=True."
        )
    written = written_names(model, adapter_only=adapter_only, merge=merge)
    lost = [name for name in trained if name not in written]
    if not lost:
        return
    if lost[0] in written_names(model, adapter_only=True):
        what = "merged weights" if merge else "the base weights alone"
        advice = (
            "give its conversion a method merged(name, weight, model), or save with adapter_only=True"
            if merge
            else "train adapters with lora_finetune_single_device or lora_finetune_distributed (in code of your own: "
            "save with adapter_only=True or merge=True), or take the adapter out of the model"
        )
    elif lost[0] in written_names(model):
        what = "the adapter alone"
        advice = "freeze it, or train it with full_finetune_single_device or full_finetune_distributed without adapters"
    else:
        what = "only what has a name in Hugging Face's or PEFT's format, and it has none"
        advice = "freeze it, or leave out the conversion that adds it"
    more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
    raise CheckpointError(f"model: '{lost[0]}'{more} is trained, but checkpoints would hold {what}: {advice}.")
