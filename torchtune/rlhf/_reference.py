"""Reference log-probs of preference losses, from a frozen model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtune.data import Batch, BatchLoader
from torchtune.generation import evaluating
from torchtune.modules.loss import LossError
from torchtune.modules.peft import adapter_modules, disable_adapter
from torchtune.rlhf._reference_cache import cache_log_probs
from torchtune.rlhf._teacher import check_same_tokenizer, warn_if_same_weights
from torchtune.rlhf.loss import AnswerLoss
from torchtune.training import ParallelDims
from torchtune.training.parallel import reshard
from torchtune.utils import UserError

# Maximum difference of policy and reference before the first update, in nats per token.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION_TOLERANCE = 0.1


class ReferenceError(UserError):
    """Raised if the reference does not fit the run."""

    raised_on_all = True


class ReferenceScores(NamedTuple):
    """Scores of the reference for a batch.

    Attributes:
        log_probs: log-probs of the documents ``[n]``; None for a loss without a reference.
        baseline: mean log-ratio of policy and reference over mismatched documents (scalar), if the loss needs it.

    Example:
        >>> torchtune.rlhf.ReferenceScores(log_probs=torch.tensor([-3.0])).baseline is None
        True
    """

    log_probs: Tensor | None = None
    baseline: Tensor | None = None


class Reference:
    """Reference of a run; called with a batch, it returns :class:`ReferenceScores`.

    Without a second model, the reference is the trained model at the start of the run. If the adapters are zero at the
    start, the reference is the model with disabled adapters; otherwise the initial values of the trained parameters are
    swapped in. The reference uses the same modules as the policy, without dropout, so the first log-ratios are 0, which
    the first call of :meth:`check_start` verifies.

    Args:
        loss: loss that scores documents; it may not need a reference.
        policy: the model to train, with its initial weights.
        dims: parallel dims.
        second: another model as the reference; by default the policy at the start.
        cached: whether the examples contain the reference log-probs.
        fresh: whether the run starts from the beginning; False for a resumed run.

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
        self._initial_weights: list[tuple[nn.Parameter, Tensor]] | None = None
        self._cached = cached
        self._should_check_start = fresh and loss.needs_reference and second is None and not _has_dropout(policy)
        if loss.needs_reference and not cached and second is None and not _equals_base(policy, dims):
            trained = (parameter for parameter in policy.parameters() if parameter.requires_grad)
            self._initial_weights = [(parameter, parameter.detach().clone()) for parameter in trained]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> ReferenceScores:
        """Score the documents of a batch on the model's device."""
        if not self._loss.needs_reference:
            return ReferenceScores()
        if self._cached:
            return ReferenceScores(batch.per_document["reference"])
        other = self._loss.mismatched_batch(batch)
        with self._reference_weights() as model:
            log_probs = _score(self._loss, model, batch, self._dims)
            of_others = None if other is None else _score(self._loss, model, other, self._dims)
        if other is None:
            return ReferenceScores(log_probs)
        with evaluating(self._policy):
            ratios = _score(self._loss, self._policy, other, self._dims) - of_others
        if self._dims.world_size == 1:
            return ReferenceScores(log_probs, ratios.mean())
        total, count = self._dims.exchange([ratios.sum(), len(ratios)])[0]
        return ReferenceScores(log_probs, torch.full((), total / count, device=ratios.device, dtype=ratios.dtype))

    @contextmanager
    def _reference_weights(self) -> Iterator[nn.Module]:
        """Context manager that yields a model with the weights of the reference, in evaluation mode."""
        if self._second is not None:
            yield self._second
        elif self._initial_weights is None:
            with evaluating(self._policy), disable_adapter(self._policy):
                yield self._policy
        else:
            with evaluating(self._policy):
                self._swap_weights()
                try:
                    yield self._policy
                finally:
                    self._swap_weights()

    def _swap_weights(self) -> None:
        """Swap the trained parameters with their initial values."""
        reshard(self._policy)  # otherwise FSDP would use the old values, which are unsharded
        for place, (parameter, value) in enumerate(self._initial_weights):
            if hasattr(parameter, "device_mesh"):
                now = parameter.detach().clone()
                parameter.detach().copy_(value)
            else:  # swap without a copy
                now, parameter.data = parameter.data, value
            self._initial_weights[place] = (parameter, now)

    def check_start(self, batch: Batch, scores: Tensor, reference: Tensor | None) -> None:
        """Check that policy and reference are equal for the first batch of a run.

        Args:
            batch: the batch, with label counts per document.
            scores: scores of the policy ``[n]``.
            reference: scores of the reference ``[n]``.

        Raises:
            ReferenceError: policy and reference differ.
        """
        if not self._should_check_start:
            return
        self._should_check_start = False
        by_token = (scores.detach() - reference).abs() / batch.per_document["label_counts"].clamp(min=1)
        allowed = _TOLERANCE.get(next(self._policy.parameters()).dtype, _LOW_PRECISION_TOLERANCE)
        if by_token.max() > allowed:
            raise ReferenceError(
                f"The reference is the model as the run starts with it, but at the first step the two differ by "
                f"{by_token.max():.3g} nats a token: a conversion of the model computes differently in training, or "
                "reference_cache is not of this model."
            )


Load = Callable[[str], nn.Module]  # loads a model of the run by its name


def load_reference(
    loss: AnswerLoss, policy: nn.Module, load: Load, checkpointer: Any, ref_checkpointer: Mapping[str, Any] | None
) -> nn.Module | None:
    """Load the reference model; return None if the reference is the policy at the start.

    Args:
        loss: loss of the run.
        policy: the trained model.
        load: function that loads the model called ``"reference"``.
        checkpointer: checkpointer of the run, with the sources ``policy`` and ``reference``.
        ref_checkpointer: checkpointer component of another model, registered by
            :func:`torchtune.training.add_reference`; None uses the policy at the start.

    Raises:
        ReferenceError: the loss needs no reference, or the vocabularies differ.
        TeacherError: the tokenizers differ.

    Example:
        >>> second = rlhf.load_reference(loss, model, load, checkpointer, cfg.ref_checkpointer)  # doctest: +SKIP
    """
    if ref_checkpointer is None:
        return None
    if not loss.needs_reference:
        raise ReferenceError(_not_needed_message("ref_checkpointer", loss))
    other, own = (checkpointer.store.source(name) for name in ("reference", "policy"))
    check_same_tokenizer(Path(other.checkpoint_dir), Path(own.checkpoint_dir), "ref_checkpointer")
    if not getattr(loss, "needs_rewards", True):
        warn_if_same_weights(other, own, "ref_checkpointer")
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
    """Check that the loss can be computed for every micro-batch of a loader, including the last one.

    Args:
        loader: loader of pairs or labeled answers; None is skipped.
        loss: loss of the run.
        name: name of the setting with the loader's batch size, for the error message.

    Raises:
        LossError: the smallest micro-batch has fewer examples than the loss needs, or lacks entries.

    Example:
        >>> rlhf.check_pairs(loader, loss, "batch_size")  # doctest: +SKIP
    """
    if loader is None:
        return
    _check_batches(loss, loader, name)
    collate = getattr(loader.collate_fn, "unsplit", loader.collate_fn)
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
    """Compute reference log-probs once, cache them in a folder, and return loaders that add them to the examples.

    Args:
        loaders: loaders of pairs; None stays None.
        loss: loss that scores documents.
        policy: the model to train, with its initial weights.
        second: reference model from :func:`load_reference`.
        dims: parallel dims; all ranks must call this function.
        folder: folder of the cache.
        epochs: number of epochs of the run; rows that are not visited in these epochs are skipped.

    Raises:
        ReferenceError: the loss needs no reference.
        UserError: the data cannot be cached, or the folder cannot be written to.

    Example:
        >>> (loader,) = rlhf.cache_reference([loader], loss, model, None, dims, folder="cache", epochs=1)
        ... # doctest: +SKIP
    """
    if not loss.needs_reference:
        raise ReferenceError(_not_needed_message("reference_cache", loss))
    model = policy if second is None else second
    frozen_only = second is None and _equals_base(policy, dims)
    device = next(model.parameters()).device
    with evaluating(model):
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


def _not_needed_message(name: str, loss: AnswerLoss) -> str:
    return f"{name}: {type(loss).__name__} does without a reference: set it to null."


def _check_batches(loss: AnswerLoss, loader: BatchLoader, name: str) -> None:
    if loader.smallest_batch >= loss.min_examples:
        return
    raise LossError(
        f"{name}: {type(loss).__name__} compares every prompt with the answer of another example of its micro-batch, "
        f"but of {len(loader.dataset):,} examples in micro-batches of {loader.batch_size} on {loader.world_size} "
        f"process(es) the smallest has {loader.smallest_batch}: set another {name}, or leave out a row with filter_fn."
    )


@torch.no_grad()
def _score(loss: AnswerLoss, model: nn.Module, batch: Batch, dims: ParallelDims) -> Tensor:
    hidden = model(**batch.model_inputs(), output="hidden")
    return dims.sum_over_sequence(loss.score(hidden, batch, model.output))


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _equals_base(model: nn.Module, dims: ParallelDims) -> bool:
    """Return whether only adapters are trained and their outputs are 0."""
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
