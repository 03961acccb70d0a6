"""Scores of a reranker, and how well it orders the first texts of a retrieval."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, RERANKER_FILE, DataError, PairTemplate, collate_documents
from torchtune.evaluation._eval_rows import EvaluationError
from torchtune.evaluation._retrieval import (
    EmbeddingSettings,
    RetrievalData,
    read_object,
    retrieval_scores,
    similarities,
)
from torchtune.generation import evaluating
from torchtune.modules import TransformerDecoder
from torchtune.rlhf.loss import pooled_scores


@dataclass(frozen=True)
class Reranker:
    """A model with one output that scores pairs of a query and a document.

    Args:
        model: the decoder.
        tokenizer: its tokenizer.
        template: the template of the training.
        max_seq_len: maximum number of tokens of a pair; by default the tokenizer's.

    Raises:
        EvaluationError: the model does not have one output.

    Example:
        >>> sources = {"checkpoint_dir": checkpoint}
        >>> judge = torchtune.modules.classifier_model(1, "torchtune.models.from_hf_config", **sources)
        >>> torchtune.evaluation.Reranker(judge, tokenizer).scores([("who sees", "the cat sees")]).shape
        torch.Size([1])
    """

    model: TransformerDecoder
    tokenizer: Any
    template: PairTemplate = field(default_factory=PairTemplate)
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        num_outputs = self.model.output.weight.shape[0]
        if num_outputs != 1:
            raise EvaluationError(
                f"reranker: it scores a pair with one output, but the model has {num_outputs:,}: train it with "
                "torchtune.rlhf.loss.RerankBCELoss, or name another folder."
            )

    @classmethod
    def of(cls, folder: str | Path, model: TransformerDecoder, tokenizer: Any) -> "Reranker":
        """Return the reranker of a checkpoint's folder, with its template.

        Raises:
            EvaluationError: the folder is not of a reranker, or a file is damaged.
        """
        path = Path(folder).expanduser() / RERANKER_FILE
        if not path.is_file():
            raise EvaluationError(
                f"{folder}: there is no {RERANKER_FILE} in it, so it is not a reranker: train one with "
                "torchtune.rlhf.loss.RerankBCELoss."
            )
        content = read_object(path)
        try:
            template = PairTemplate(content["template"], bool(content.get("add_eos")))
        except (KeyError, AttributeError, DataError) as error:
            raise EvaluationError(f"{path}: it has no template with {{query}} and {{document}}: correct it.") from error
        return cls(model, tokenizer, template, content.get("max_seq_len"))

    @torch.no_grad()
    def scores(self, pairs: Sequence[tuple[str, str]], *, batch_size: int = 32) -> Tensor:
        """Return the scores of pairs of a query and a document, float32 ``[n]``, on the host."""
        tokenizer_limit = getattr(self.tokenizer, "max_seq_len", None)
        limit = self.max_seq_len or tokenizer_limit or self.model.max_seq_len
        device = self.model.tok_embeddings.weight.device
        scores = []
        with evaluating(self.model):
            for start in tqdm(range(0, len(pairs), batch_size), desc="Reranking", unit="batch", disable=None):
                documents = []
                for query, document in pairs[start : start + batch_size]:
                    tokens = self.template.tokens(self.tokenizer, query, document, limit)
                    documents.append({"tokens": tokens, "labels": [CROSS_ENTROPY_IGNORE_IDX] * len(tokens)})
                batch = collate_documents(documents).to(device)
                hidden = self.model(**batch.model_inputs(), output="hidden")
                scores.append(pooled_scores(hidden, batch, self.model.output).float().cpu())
        return torch.cat(scores)


def rerank(
    similarity: Tensor, reranker: Reranker, data: RetrievalData, *, first: int = 100, batch_size: int = 32
) -> Tensor:
    """Order the most similar texts of each query by a reranker; the other texts follow in their order.

    Args:
        similarity: similarities of queries and texts ``[n, m]``.
        reranker: the reranker.
        data: queries and corpus.
        first: number of texts of each query to order anew.
        batch_size: pairs per forward pass.

    Returns:
        Values ``[n, m]``, the higher the earlier.
    """
    num_texts = similarity.shape[1]
    ranking = similarity.argsort(dim=1, descending=True, stable=True)  # [n, m], indices of texts
    candidates = ranking[:, : min(first, num_texts)]  # [n, k]
    pairs = []
    for query, texts in zip(data.queries, candidates.tolist(), strict=True):
        for text in texts:
            pairs.append((query, data.corpus[text]))
    scores = reranker.scores(pairs, batch_size=batch_size).view(candidates.shape)  # [n, k]
    order = scores.argsort(dim=1, descending=True, stable=True)
    reranked = candidates.gather(1, order)
    ranking = torch.cat([reranked, ranking[:, candidates.shape[1] :]], dim=1)  # [n, m]
    # The text at rank r gets the value m - r.
    values = torch.arange(num_texts, 0, -1.0).expand(ranking.shape)
    return torch.empty_like(values, memory_format=torch.contiguous_format).scatter(1, ranking, values)


def evaluate_reranking(
    model: TransformerDecoder,
    tokenizer: Any,
    reranker: Reranker,
    data: RetrievalData,
    *,
    settings: EmbeddingSettings | None = None,
    first: int = 100,
    dimensions: int | None = None,
    recall_at: Sequence[int] = (1, 5, 10),
    batch_size: int = 32,
) -> tuple[dict[str, float], dict[str, float]]:
    """Score the ranking of a corpus by an embedding model, and the same after a reranker has ordered the first texts.

    Args:
        model: the embedding model.
        tokenizer: its tokenizer.
        reranker: the reranker.
        data: from :func:`read_retrieval`.
        settings: how the model embeds; by default with its last token, without instructions.
        first: number of texts of each query that the reranker orders.
        dimensions: see :func:`embed`.
        recall_at: see :func:`retrieval_scores`.
        batch_size: texts or pairs per forward pass.

    Returns:
        The scores before and after; see :func:`retrieval_scores`.

    Example:
        >>> sources = {"checkpoint_dir": checkpoint}
        >>> judge = torchtune.modules.classifier_model(1, "torchtune.models.from_hf_config", **sources)
        >>> reranker = torchtune.evaluation.Reranker(judge, tokenizer)
        >>> data = torchtune.evaluation.RetrievalData(["the cat"], ["the cat", "one dog"], [[0]])
        >>> before, after = torchtune.evaluation.evaluate_reranking(model, tokenizer, reranker, data)
        >>> before["recall@1"], after["recall@5"]
        (1.0, 1.0)
    """
    similarity = similarities(model, tokenizer, data, settings=settings, dimensions=dimensions, batch_size=batch_size)
    before = retrieval_scores(similarity, data.relevant, recall_at=recall_at)
    reranked = rerank(similarity, reranker, data, first=first, batch_size=batch_size)
    return before, retrieval_scores(reranked, data.relevant, recall_at=recall_at)
