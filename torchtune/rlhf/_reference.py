"""What a loss of preferences compares the trained model with: log-probs of a model that is not trained."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtune.data import Batch, BatchLoader
from torchtune.modules.loss import LossError
from torchtune.modules.peft import disable_adapter
from torchtune.modules.peft._utils import adapter_modules
from torchtune.rlhf._reference_cache import cache_log_probs
from torchtune.rlhf._teacher import check_same_tokenizer, warn_of_itself
from torchtune.rlhf.loss import AnswerLoss
from torchtune.training import ParallelDims
from torchtune.training.parallel._shards import reshard
from torchtune.utils import UserError

# Nats by token that a model may differ from itself before it is trained.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION_TOLERANCE = 0.1


class ReferenceError(UserError):
    """A reference that a run cannot be compared with."""

    told_by_rank_0 = True  # all ranks find the same


class ReferenceScores(NamedTuple):
    """What the reference says of a batch.

    Attributes:
        log_probs: of every document ``[n]``; None for a loss that does without a reference.
        baseline: mean log-ratio of policy and reference over other documents (scalar), where the loss asks for it.

    Example:
        >>> torchtune.rlhf.ReferenceScores(log_probs=torch.tensor([-3.0])).baseline is None
        True
    """

    log_probs: Tensor | None = None
    baseline: Tensor | None = None


class Reference:
    """The reference of a run; called with a batch, it returns :class:`ReferenceScores`.

    Without a second model the reference is the trained model as the run starts with it: its adapters are switched off
    where they change nothing yet, and values of trained parameters from then take their place otherwise. It runs
    through the same modules, without dropout, so the first log-ratios are 0; the first call of :meth:`check_start`
    holds a run to that.

    Args:
        loss: says whether it needs a reference, and scores documents.
        policy: the model that is trained, loaded and not trained yet.
        dims: the processes.
        second: another model.
        cached: the examples carry the log-probs.
        fresh: whether no step was done yet.

    Example:
        >>> dims, loss = torchtune.training.ParallelDims(), torchtune.rlhf.loss.SimPOLoss()
        >>> reference = torchtune.rlhf.Reference(loss, model, dims)  # SimPO needs none
        >>> loss.needs_reference
        False
    """

    def __init__(
        self,
        loss: AnswerLoss,
        policy: nn.Module,
        dims: ParallelDims,
        *,
        second: nn.Module | None = None,
        cached: bool = False,
        fresh: bool = False,
    ) -> None:
        self._loss, self._policy, self._dims, self._second = loss, policy, dims, second
        self._start: list[tuple[nn.Parameter, Tensor]] | None = None
        self._cached = cached
        self._unchecked = fresh and loss.needs_reference and second is None and not _has_dropout(policy)
        if loss.needs_reference and not cached and second is None and not _changes_nothing(policy, dims):
            trained = (parameter for parameter in policy.parameters() if parameter.requires_grad)
            self._start = [(parameter, parameter.detach().clone()) for parameter in trained]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> ReferenceScores:
        """Score the documents of a batch that is on the device."""
        if not self._loss.needs_reference:
            return ReferenceScores()
        if self._cached:
            return ReferenceScores(batch.per_document["reference"])
        other = self._loss.mismatched(batch)
        with self._in_force() as model:
            log_probs = _score(self._loss, model, batch, self._dims)
            of_others = None if other is None else _score(self._loss, model, other, self._dims)
        if other is None:
            return ReferenceScores(log_probs)
        with _evaluating(self._policy):
            ratios = _score(self._loss, self._policy, other, self._dims) - of_others
        total, count = self._dims.exchange([ratios.sum(), len(ratios)])[0]
        return ReferenceScores(log_probs, torch.tensor(total / count, device=ratios.device, dtype=ratios.dtype))

    @contextmanager
    def _in_force(self) -> Iterator[nn.Module]:
        """The model that computes as the reference inside the block, in evaluation mode."""
        if self._second is not None:
            yield self._second
        elif self._start is None:
            with _evaluating(self._policy), disable_adapter(self._policy):
                yield self._policy
        else:
            with _evaluating(self._policy):
                self._exchange()
                try:
                    yield self._policy
                finally:
                    self._exchange()

    def _exchange(self) -> None:
        """Trained parameters and their values at the start change places."""
        reshard(self._policy)  # FSDP gathers the other values then
        for place, (parameter, value) in enumerate(self._start):
            if hasattr(parameter, "device_mesh"):
                now = parameter.detach().clone()
                parameter.detach().copy_(value)
            else:  # no copy is made
                now, parameter.data = parameter.data, value
            self._start[place] = (parameter, now)

    def check_start(self, batch: Batch, scores: Tensor, reference: Tensor | None) -> None:
        """See, for the first batch of a run, that the model does not differ from itself.

        Args:
            batch: says how many labels each document has.
            scores: of the model that is trained ``[n]``.
            reference: of the reference ``[n]``.

        Raises:
            ReferenceError: it does.
        """
        if not self._unchecked:
            return
        self._unchecked = False
        by_token = (scores.detach() - reference).abs() / batch.per_document["label_counts"].clamp(min=1)
        allowed = _TOLERANCE.get(next(self._policy.parameters()).dtype, _LOW_PRECISION_TOLERANCE)
        if by_token.max() > allowed:
            raise ReferenceError(
                f"The reference is the model as the run starts with it, but at the first step the two differ by "
                f"{by_token.max():.3g} nats a token: a conversion of the model computes differently in training, or "
                "reference_cache is not of this model."
            )


Load = Callable[[str], nn.Module]  # the name of a model of a run to that model


def load_reference(
    loss: AnswerLoss, policy: nn.Module, load: Load, checkpointer: Any, ref_checkpointer: Mapping[str, Any] | None
) -> nn.Module | None:
    """The other model that a run is compared with; None where that is the policy as the run starts with it.

    Args:
        loss: of the run.
        policy: the model that is trained.
        load: makes the model called ``"reference"``.
        checkpointer: of the run, with the sources ``policy`` and ``reference``.
        ref_checkpointer: component of the checkpointer of another model, which :func:`torchtune.training.add_reference`
            has named; None takes the policy at the start.

    Raises:
        ReferenceError: the loss does without a reference, or the two models differ in vocabulary.
        TeacherError: they have different tokenizers.

    Example:
        >>> second = rlhf.load_reference(loss, model, load, checkpointer, cfg.ref_checkpointer)  # doctest: +SKIP
    """
    if ref_checkpointer is None:
        return None
    if not loss.needs_reference:
        raise ReferenceError(_needless("ref_checkpointer", loss))
    other, own = (checkpointer.store.source(name) for name in ("reference", "policy"))
    check_same_tokenizer(Path(other.checkpoint_dir), Path(own.checkpoint_dir), "ref_checkpointer")
    if not getattr(loss, "needs_rewards", True):
        warn_of_itself(other, own, "ref_checkpointer")
    second = load("reference").requires_grad_(False).eval()
    mine, theirs = (model.tok_embeddings.weight.shape[0] for model in (policy, second))
    if theirs < mine:
        raise ReferenceError(
            f"ref_checkpointer: the reference has a vocabulary of {theirs:,} tokens and the model one of {mine:,}: "
            "take a reference with the same tokenizer."
        )
    loss.check_model(second)
    return second


def check_pairs(loader: BatchLoader | None, loss: AnswerLoss, name: str) -> None:
    """See that the loss can be computed of every micro-batch of a loader, the last one too.

    Args:
        loader: of pairs, or of labelled answers; None is left alone.
        loss: of the run.
        name: setting of the loader's batch size, for the message.

    Raises:
        LossError: a micro-batch would have fewer examples than the loss needs, or other entries.

    Example:
        >>> rlhf.check_pairs(loader, loss, "batch_size")  # doctest: +SKIP
    """
    if loader is None:
        return
    _check_batches(loss, loader, name)
    collate = getattr(loader.collate_fn, "of_whole_batch", loader.collate_fn)
    loss.check_batch(Batch.from_dict(collate([loader.dataset[0]])))


def cache_reference(
    loaders: Sequence[BatchLoader | None],
    loss: AnswerLoss,
    policy: nn.Module,
    second: nn.Module | None,
    dims: ParallelDims,
    *,
    folder: str,
    epochs: int,
) -> list[BatchLoader | None]:
    """Loaders whose examples carry log-probs of the reference, which are computed once and kept in a folder.

    Args:
        loaders: of pairs; None stays None.
        loss: scores documents.
        policy: the model that is trained, loaded and not trained yet.
        second: from :func:`load_reference`.
        dims: the processes, which call this together.
        folder: in which log-probs are kept.
        epochs: of the run; rows that it does not come to are left out.

    Raises:
        ReferenceError: the loss does without a reference.
        UserError: log-probs cannot be kept there, or not of these data.

    Example:
        >>> (loader,) = rlhf.cache_reference([loader], loss, model, None, dims, folder="cache", epochs=1)
        ... # doctest: +SKIP
    """
    if not loss.needs_reference:
        raise ReferenceError(_needless("reference_cache", loss))
    model = policy if second is None else second
    frozen_only = second is None and _changes_nothing(policy, dims)
    device = next(model.parameters()).device
    with _evaluating(model):
        found = cache_log_probs(
            [loader for loader in loaders if loader is not None],
            lambda batch: _score(loss, model, batch.to(device), dims),
            parameters=[
                (name, one) for name, one in model.named_parameters() if not (frozen_only and one.requires_grad)
            ],
            dims=dims,
            folder=folder,
            epochs=epochs,
        )
    reshard(model)
    return [None if loader is None else found.pop(0) for loader in loaders]


def _needless(name: str, loss: AnswerLoss) -> str:
    return f"{name}: {type(loss).__name__} does without a reference: set it to null."


def _check_batches(loss: AnswerLoss, loader: BatchLoader, name: str) -> None:
    if loader.smallest_batch >= loss.min_examples:
        return
    size, rows, ranks, least = loader.batch_size, len(loader.dataset), loader.world_size, loss.min_examples
    left = {other: rows % (other * ranks) for other in range(least, size + 64)}
    fits = [other for other, last in left.items() if not last or last >= least * ranks]
    nearest = min(fits, key=lambda other: abs(other - size), default=None)
    what = "leave out a row with filter_fn" if nearest is None else f"set {name} to {nearest}"
    raise LossError(
        f"{name}: {type(loss).__name__} compares every prompt with the answer of another example of its micro-batch, "
        f"but of {rows:,} examples in micro-batches of {size} on {ranks} process(es) the smallest has "
        f"{loader.smallest_batch}: {what}."
    )


@torch.no_grad()
def _score(loss: AnswerLoss, model: nn.Module, batch: Batch, dims: ParallelDims) -> Tensor:
    hidden = model(**batch.model_inputs(), output="hidden")
    return dims.sum_over_sequence(loss.score(hidden, batch, model.output))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and back in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _changes_nothing(model: nn.Module, dims: ParallelDims) -> bool:
    """Whether all that is trained are adapters that add 0."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    changed = False
    for _, module in adapter_modules(model):
        if getattr(module, "disabled", None) is False:
            own = dict(module.named_parameters())
            trained -= {id(own[name]) for name in module.adapter_params()}
            last = getattr(getattr(module, "lora_b", None), "weight", None)
            last = last.to_local() if hasattr(last, "to_local") else last
            changed = changed or last is None or bool(last.detach().any())
    return not dims.any(changed or bool(trained))
