"""Frozen reference of preference losses, and checks of it and of the pairs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtune.data import Batch, BatchLoader
from torchtune.generation import evaluating
from torchtune.modules.loss import LossError
from torchtune.modules.peft import adapter_modules, disable_adapter
from torchtune.rlhf._teacher import check_new_tokens, check_same_tokenizer, warn_if_same_weights
from torchtune.rlhf.loss import AnswerLoss
from torchtune.training.parallel import ParallelDims, reshard
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
        self._loss = loss
        self._policy = policy
        self._dims = dims
        self._second = second
        self._cached = cached
        is_policy_at_start = loss.needs_reference and second is None
        # Dropout makes the first scores of the policy differ from those of the reference.
        has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in policy.modules())
        # Neither are they equal in a resumed run, whose policy has been trained.
        self._should_check_start = fresh and is_policy_at_start and not has_dropout
        # Trained parameters with their initial values; None if disabling the adapters gives the reference.
        self._initial_weights: list[tuple[nn.Parameter, Tensor]] | None = None
        if is_policy_at_start and not cached and not equals_base(policy, dims):
            self._initial_weights = []
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    self._initial_weights.append((parameter, parameter.detach().clone()))

    @torch.no_grad()
    def __call__(self, batch: Batch) -> ReferenceScores:
        """Score the documents of a batch on the model's device."""
        if not self._loss.needs_reference:
            return ReferenceScores()
        if self._cached:
            return ReferenceScores(batch.per_document["reference"])
        mismatched = self._loss.mismatched_batch(batch)  # None for all losses without a baseline
        with self._reference_weights() as model:
            log_probs = score_documents(self._loss, model, batch, self._dims)
            if mismatched is None:
                return ReferenceScores(log_probs)
            mismatched_log_probs = score_documents(self._loss, model, mismatched, self._dims)
        # After the block, in which the policy may have the weights of the reference. Also without dropout.
        with evaluating(self._policy):
            policy_log_probs = score_documents(self._loss, self._policy, mismatched, self._dims)
        log_ratios = policy_log_probs - mismatched_log_probs  # [n]
        if self._dims.world_size == 1:  # without an exchange, so that the host does not wait for the device
            return ReferenceScores(log_probs, log_ratios.mean())
        # The mean over all ranks, so that the loss does not depend on their number.
        (total, num_documents), _ = self._dims.exchange([log_ratios.sum(), len(log_ratios)])
        baseline = torch.full((), total / num_documents, device=log_ratios.device, dtype=log_ratios.dtype)
        return ReferenceScores(log_probs, baseline)

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
        swapped = []
        for parameter, stored in self._initial_weights:
            if isinstance(parameter, DTensor):  # FSDP keeps views of the local tensor, which must stay
                current = parameter.detach().clone()
                parameter.detach().copy_(stored)
            else:  # without a copy
                current = parameter.data
                parameter.data = stored
            swapped.append((parameter, current))
        self._initial_weights = swapped

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
        label_counts = batch.per_document["label_counts"].clamp(min=1)
        difference = ((scores.detach() - reference).abs() / label_counts).max()  # in nats per token
        dtype = next(self._policy.parameters()).dtype
        if difference > _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE):
            raise ReferenceError(
                f"The reference is the model as the run starts with it, but at the first step the two differ by "
                f"{difference:.3g} nats a token: a conversion of the model computes differently in training, or "
                "reference_cache is not of this model."
            )


Load = Callable[[str], nn.Module]  # loads a model of the run by its name


def load_reference(
    loss: AnswerLoss,
    policy: nn.Module,
    load: Load,
    checkpointer: Any,
    ref_checkpointer: Mapping[str, Any] | None,
    tokenizer: Any = None,
) -> nn.Module | None:
    """Load the reference model; return None if the reference is the policy at the start.

    Args:
        loss: loss of the run.
        policy: the trained model.
        load: function that loads the model called ``"reference"``.
        checkpointer: checkpointer of the run, with the sources ``policy`` and ``reference``.
        ref_checkpointer: checkpointer component of another model, registered by
            :func:`torchtune.checkpoints.add_reference`; None uses the policy at the start.
        tokenizer: tokenizer of the run, whose new tokens the teacher of on-policy distillation must know.

    Raises:
        ReferenceError: the loss needs no reference, or the vocabularies differ.
        TeacherError: the tokenizers differ, or a teacher does not know a new token.

    Example:
        >>> second = rlhf.load_reference(loss, model, load, checkpointer, cfg.ref_checkpointer)  # doctest: +SKIP
    """
    if ref_checkpointer is None:
        return None
    if not loss.needs_reference:
        raise not_needed_error("ref_checkpointer", loss)
    reference_source = checkpointer.source("reference")
    policy_source = checkpointer.source("policy")
    reference_folder = Path(reference_source.checkpoint_dir)
    check_same_tokenizer(reference_folder, Path(policy_source.checkpoint_dir), "ref_checkpointer")
    # On-policy distillation: its loss takes no rewards. Losses of pairs lack the attribute.
    is_teacher = not getattr(loss, "needs_rewards", True)
    if is_teacher:
        check_new_tokens(tokenizer, reference_folder, "ref_checkpointer", "teacher")
        warn_if_same_weights(reference_source, policy_source, "ref_checkpointer")
    reference = load("reference").requires_grad_(False).eval()
    reference_vocab_size = reference.tok_embeddings.weight.shape[0]
    policy_vocab_size = policy.tok_embeddings.weight.shape[0]
    if reference_vocab_size < policy_vocab_size:  # it would lack tokens of the data; padding may make it larger
        raise ReferenceError(
            f"ref_checkpointer: the reference has a vocabulary of {reference_vocab_size:,} tokens and the model one of "
            f"{policy_vocab_size:,}: take a reference with the same tokenizer."
        )
    loss.check_model(reference)
    return reference


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
    if loader.smallest_batch < loss.min_examples:
        raise LossError(
            f"{name}: {type(loss).__name__} compares every prompt with the answer of another example of its "
            f"micro-batch, but of {len(loader.dataset):,} examples in micro-batches of {loader.batch_size} on "
            f"{loader.world_size} process(es) the smallest has {loader.smallest_batch}: set another {name}, or leave "
            "out a row with filter_fn."
        )
    collate = ParallelDims.unsharded_collate(loader.collate_fn)
    loss.check_batch(Batch.from_dict(collate([loader.dataset[0]])))
    loss.check_loader(loader, name)


def not_needed_error(setting: str, loss: AnswerLoss) -> ReferenceError:
    """Return the error of a setting of the reference, for a loss without one."""
    return ReferenceError(f"{setting}: {type(loss).__name__} needs no reference: set it to null.")


@torch.no_grad()
def score_documents(loss: AnswerLoss, model: nn.Module, batch: Batch, dims: ParallelDims) -> Tensor:
    """Score the documents of a batch ``[n]``, the same on all ranks that share the batch."""
    hidden = model(**batch.model_inputs(), output="hidden")
    return dims.sum_over_sequence(loss.score(hidden, batch, model.output))


def equals_base(model: nn.Module, dims: ParallelDims) -> bool:
    """Return whether only adapters are trained and their outputs are 0, as at the start of LoRA. A collective."""
    # Trained parameters whose effect remains with disabled adapters: those of the adapters are removed below.
    other_trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    changes_outputs = False
    for _, module in adapter_modules(model):
        if getattr(module, "disabled", None) is not False:  # this adapter cannot be disabled, or is already
            continue
        parameters = dict(module.named_parameters())
        other_trained -= {id(parameters[name]) for name in module.adapter_params()}
        # The output of LoRA is 0 while its second matrix is; nothing is known of an adapter without one.
        lora_b = getattr(module, "lora_b", None)
        weight = getattr(lora_b, "weight", None)
        if weight is None:
            changes_outputs = True
            continue
        if isinstance(weight, DTensor):
            weight = weight.to_local()  # this rank's shard; `dims.any` adds those of the others
        changes_outputs = changes_outputs or bool(weight.detach().any())
    return not dims.any(changes_outputs or bool(other_trained))
