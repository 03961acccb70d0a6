"""Sharing of prompts among answers, so that a prompt is computed once."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchtune.data import Batch, BatchLoader, DataError, share_prefixes
from torchtune.modules import TransformerDecoder
from torchtune.modules.transformer import text_decoder
from torchtune.rlhf.loss import AnswerLoss, RewardLoss
from torchtune.training import ParallelDims
from torchtune.utils import UserError, get_logger, log_once


class SharingError(UserError):
    """Raised if ``share_prefix`` is True but not possible."""

    raised_on_all = True


def can_share_prefixes(model: nn.Module, share_prefix: bool | None = None) -> bool:
    """Return whether documents share prefixes in a run: ``share_prefix``, or if None, whether the model supports it.

    Raises:
        SharingError: ``share_prefix`` is True, but the model does not support it.

    Example:
        >>> torchtune.rlhf.can_share_prefixes(model)
        True
    """
    if share_prefix is False:
        return False
    decoder = text_decoder(model)
    if not isinstance(decoder, TransformerDecoder):
        reason = f"{type(decoder).__name__} is no TransformerDecoder"
    elif hasattr(model, "prefix_obstacle"):  # a model around the decoder may have obstacles of its own
        reason = model.prefix_obstacle()
    else:
        reason = decoder.prefix_obstacle()
    if reason and share_prefix:
        raise SharingError(f"share_prefix: no prompt can be computed once, because {reason}: set it to null.")
    if reason:
        log_once(get_logger(), f"A prompt is computed anew for each of its answers, because {reason}.")
    return reason is None


def share_pairs(
    loader: BatchLoader | None, model: nn.Module, loss: Any, dims: ParallelDims, *, share_prefix: bool | None = None
) -> BatchLoader | None:
    """Return a loader in which both answers of a pair share their common prefix, which is computed once.

    Labeled tokens are also shared if the loss uses only one number per answer, as all losses of this library do.

    Args:
        loader: loader of pairs; None stays None.
        model: the trained model.
        loss: loss of the run.
        dims: parallel dims, which may split a batch.
        share_prefix: True requires sharing, False disables it, and None shares if model and data allow it.

    Raises:
        SharingError: ``share_prefix`` is True, but the model does not support it.
        DataError: ``share_prefix`` is True, and a batch has no pairs; raised when the batch is collated.

    Example:
        >>> # In the setup of a recipe:
        >>> self.loader = rlhf.share_pairs(self.loader, model, self.loss_fn, self.dims)  # doctest: +SKIP
    """
    if loader is None or not can_share_prefixes(model, share_prefix):
        return loader
    # Scores of a whole answer do not change if the first tokens of both answers are computed once.
    scores_whole_answers = getattr(type(loss), "score", None) in (AnswerLoss.score, RewardLoss.score)
    collate = ParallelDims.unsharded_collate(loader.collate_fn)

    def collate_shared(examples: Sequence[Any]) -> Batch:
        batch = Batch.from_dict(collate(examples))
        if "pair" in batch.per_document and batch.documents is not None and not batch.inputs:
            return share_prefixes(batch, batch.per_document["pair"].tolist(), labelled=scores_whole_answers)
        if share_prefix:
            raise DataError("share_prefix: the batches have no pairs of documents: set it to null.")
        return batch

    return loader.derive(collate_fn=dims.collate(collate_shared))
