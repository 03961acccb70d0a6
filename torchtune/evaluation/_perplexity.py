"""Perplexity of a model on a dataset."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from torchtune.data import BatchLoader, collate_documents
from torchtune.evaluation._eval_rows import EvaluationError
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.transformer import TransformerDecoder
from torchtune.training.parallel import sequence_multiple


@dataclass(frozen=True)
class Perplexity:
    """Mean negative log-likelihood over labeled tokens.

    Attributes:
        loss: mean negative log-likelihood in nats per labeled token.
        tokens: number of labeled tokens.

    Example:
        >>> torchtune.evaluation.Perplexity(loss=0.0, tokens=12).value
        1.0
    """

    loss: float
    tokens: int

    @property
    def value(self) -> float:
        """``exp(loss)``, or infinity on overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def perplexity(model: TransformerDecoder, dataset: Any, *, batch_size: int = 4) -> Perplexity:
    """Compute the mean loss over a dataset's labeled tokens, as in validation.

    All ranks of a sharded model call it with the same dataset.

    Args:
        model: the decoder; it runs in evaluation mode.
        dataset: rows with ``tokens`` and ``labels``, packed or not, as from :mod:`torchtune.datasets`.
        batch_size: rows per batch.

    Raises:
        EvaluationError: a row is longer than the model's context, no token is labeled, or the loss is not finite.

    Example:
        >>> rows = [{"tokens": [5, 6, 7], "labels": [6, 7, -100]}]
        >>> torchtune.evaluation.perplexity(model, rows).tokens
        2
    """
    loss_fn = LinearCrossEntropyLoss()
    device = model.tok_embeddings.weight.device
    multiple = sequence_multiple(model)
    loader = BatchLoader(dataset, batch_size=batch_size, collate_fn=collate_documents, shuffle=False, seed=0)
    total_loss = 0.0
    tokens = 0
    rows = 0
    was_training = model.training
    model.eval()
    try:
        for (batch,) in tqdm(loader, desc="Perplexity", unit="batch", disable=None):
            longest = int(batch.input_pos.max()) + 1
            if longest > model.max_seq_len:
                raise EvaluationError(
                    f"perplexity: one of the rows {rows + 1} to {rows + batch_size} has {longest:,} tokens and the "
                    f"model's context is {model.max_seq_len:,}: split it."
                )
            rows += batch_size
            if batch.num_labels:
                batch = batch.pad_to_multiple(multiple).to(device)
                hidden = model(**batch.model_inputs(), output="hidden")
                # A sum over tokens: the mean of batch means would weigh short batches more.
                loss_sum, count = loss_fn.sum_and_count(hidden, batch.labels, model.output)
                total_loss += float(loss_sum)
                tokens += int(count)
    finally:
        model.train(was_training)
    if not tokens:
        raise EvaluationError("perplexity: no token of the data is labeled: use rows with an answer, or texts.")
    if not math.isfinite(total_loss):
        raise EvaluationError(
            f"perplexity: the loss is {total_loss}: load the model in fp32, or its training has diverged."
        )
    return Perplexity(total_loss / tokens, tokens)
