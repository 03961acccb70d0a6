"""View of a model for one save: names in files, trained and merged weights, and shards to write.

The weight map of the model's family (``models/<family>.py``) defines a weight's name in files:
:attr:`SaveView.groups` for base weights, :attr:`SaveView.adapter_groups` for adapters, ``_adapter.py`` for the rest of
PEFT's layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._model_weights import ModelWeights, listed, replaced_parameters, wrong
from torchtune.checkpoints._safetensors_file import Entry, TensorSlice
from torchtune.models import Group, Identity
from torchtune.modules.peft import has_adapters
from torchtune.training.parallel import LocalShard, Ranks, full_slices, full_tensor

Content = Literal["model", "adapter", "merged"]
# Contents for one model, or for several by name.
Contents = Content | Sequence[Content] | Mapping[str, Content | Sequence[Content]]
_CHOICES = ({"model"}, {"adapter"}, {"merged"}, {"adapter", "merged"})
_WITH_ADAPTER = 'save with contents="adapter" or ("adapter", "merged")'


def checkpoint_contents(models: nn.Module, *, merge: bool) -> Contents:
    """Return the contents of a run's checkpoints: adapters, or all weights of a model without adapters.

    Args:
        models: the model, or several by name (``torch.nn.ModuleDict``).
        merge: for models with adapters, also save all weights with the adapters merged.

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


class SaveView(ModelWeights):
    """View of the weights of one model for one save.

    Args:
        model: the model; on any device for :meth:`check`, materialized for all other methods.
        contents: from :func:`contents_of`.
        ranks: all ranks; not needed for :meth:`check`.

    Attributes:
        contents: see Args.
        has_weights: whether all weights are written.
        merges: whether adapters are merged into the weights, in float32, then rounded.
        has_adapter: whether the adapter is written.
        ranks: see Args.
    """

    def __init__(self, model: nn.Module, contents: frozenset[str], ranks: Ranks | None = None) -> None:
        super().__init__(model)
        self.contents, self.ranks = contents, ranks
        self.has_adapter, self.merges = "adapter" in contents, "merged" in contents
        self.has_weights = contents != {"adapter"}

    @cached_property
    def trained(self) -> list[str]:
        """Names of the parameters that require a gradient, or that a hook of a conversion changes."""
        moved = set().union(*(conversion.moved_parameters(self.model) for conversion in self.conversions))
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad or name in moved]

    def _in_adapter(self, *, merge: bool = False) -> set[str]:
        """Return owned parameters that an adapter file preserves; with ``merge``, only of mergeable conversions."""
        pairs = zip(self.conversions, self._owned_by, strict=True)
        kept = set().union(*(owned for conversion, owned in pairs if conversion.can_merge or not merge))
        rows = (rows for rows, _ in self.new_rows.values())
        return kept & {*self.adapter_groups, *rows, *(name for names in self.owned_files.values() for name in names)}

    def check(self, *, resumable: bool = True) -> None:
        """Check that the save writes all trained parameters.

        Args:
            resumable: whether a resume reads the checkpoint; for a model with an adapter it reads only the adapter.

        Raises:
            CheckpointError: a trained parameter would not be written, or a weight is not found under its name.
        """
        self.check_names(exported=self.has_weights)
        if (init := getattr(self.model, "adapter_init", None)) and self.contents == {"model"}:
            raise CheckpointError(
                f"model: its base lacks what the adapter started with (init_lora_weights = '{init}'), so it is not "
                f"saved without the adapter: {_WITH_ADAPTER}."
            )
        if resumable and self.merges and not self.has_adapter:
            raise CheckpointError(f"contents: a resume needs the adapter beside the merged weights: {_WITH_ADAPTER}.")
        adapter, weights = self._in_adapter(), self.base.intersection(self.groups) | self.inside
        written = weights if self.has_weights and not (resumable and self.has_adapter) else set()
        if self.has_adapter or self.merges:
            written = written | self._in_adapter(merge=self.merges)
        lost = [name for name in self.trained if name not in written]
        if not lost:
            return
        if lost[0] in adapter:
            what = "merged weights" if self.merges else "the base weights alone"
            advice = (
                'give its conversion a method merged(name, weight, model), or save with contents="adapter" '
                "(save_adapter_weights_only=True)"
                if self.merges
                else "train adapters with lora_finetune_single_device or lora_finetune_distributed (in code of your "
                f"own: {_WITH_ADAPTER}), or take the adapter out of the model"
            )
        elif lost[0] in weights:
            what = "the adapter alone"
            advice = (
                "freeze it, or train it with full_finetune_single_device or full_finetune_distributed without adapters"
            )
        else:
            what = "only what has a name in Hugging Face's or PEFT's format, and it has none"
            advice = "name it in owned_parameters(model) of the conversion that adds it, freeze it, or leave that out"
        more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        raise CheckpointError(f"model: '{lost[0]}'{more} is trained, but checkpoints would hold {what}: {advice}.")

    def entry(self, group: Group, turn: int) -> Entry:
        """Return the tensors of one group, under their external names.

        Computing them needs memory for one full tensor. If the entry merges into a sharded model, it is a collective.

        Args:
            group: group of a weight map.
            turn: chooses the writer among replicas, see :meth:`LocalShard.of`.
        """
        op, description = group.op, group.description
        specs = op.to_external([self.specs[name] for name in group.tune], description)
        shapes = [spec.shape for spec in specs]

        def make() -> list[TensorSlice]:
            made = []
            for index, name in enumerate(group.tune):
                shard = self.shard(name, turn)
                for part in op.external_slices(index, shard.slices, shapes, description) if shard.is_writer else ():
                    data, start = part.of(shard.data), tuple(dim.start for dim in part.slices)
                    made.append(TensorSlice(group.external[part.external], start, tuple(data.shape), data))
            return made

        return Entry(dict(zip(group.external, specs, strict=True)), make, specs[0].itemsize)

    def entry_of(self, name: str, external: str, turn: int) -> Entry:
        """Return an unchanged parameter under the name ``external``; see :meth:`entry`."""
        return self.entry(Group((external,), (name,), Identity(), self.identity[1]), turn)

    def shard(self, name: str, turn: int) -> LocalShard:
        """Return this rank's shard of a full weight to save; see :meth:`entry`.

        A collective: conversions and merging need an all-gather.
        """
        weight = parameter = self.parameters.get(name)
        if self.merges and name in self.base and (inside := self._merged_into(name)):
            weight = self._merged(name, inside)
        elif name in self.stored:
            weight = self.full(name)
        if name in self.stored or not isinstance(parameter, DTensor):
            is_writer = self.ranks.rank == turn % self.ranks.size
            return LocalShard(self.specs[name], full_slices(weight.shape), weight.detach(), is_writer)
        shard = LocalShard.of(parameter, self.ranks, turn)
        # A view would keep the full weight in memory.
        return shard if weight is parameter else replace(shard, data=weight[shard.slices].clone())

    @cached_property
    def _apart(self) -> set[str]:
        """Owned parameters of modules without a base weight: they may change any weight."""
        layers = {name.rpartition(".")[0] for name in self.base}
        return {name for name in self.owned if not layers.intersection(_parents(name))}

    def _merged_into(self, name: str) -> set[str]:
        """Return the parameters from which a merged weight is computed; empty if no conversion owns any of them."""
        path = name.rpartition(".")[0]
        inside = {f"{path}.{leaf}" for leaf, _ in self.model.get_submodule(path).named_parameters()} | self._apart
        return inside if inside & self.owned else set()

    def _merged(self, name: str, inside: set[str]) -> torch.Tensor:
        sharded = [key for key in sorted(inside) if isinstance(self.parameters[key], DTensor)]
        gathered = {key: full_tensor(self.parameters[key]) for key in sharded}
        with replaced_parameters(self.model, gathered):
            weight = self.full(name, gathered)
            for conversion in self.conversions:
                merged = conversion.merged(name, weight, self.model)
                if merged.shape != weight.shape or merged.dtype != weight.dtype:
                    found, wanted = listed({name: merged}), f"the weight is {listed({name: weight})}"
                    raise wrong(conversion, f"merged('{name}', …)", found, wanted)
                weight = merged
        return weight


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
