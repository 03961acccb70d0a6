"""Retrieval from a corpus: embeddings of texts, rerankers, and how well they rank the relevant texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, RERANKER_FILE, DataError, PairTemplate, collate_documents
from torchtune.datasets import RowFormat, format_of, read_rows
from torchtune.evaluation._eval_rows import EvaluationError
from torchtune.generation import evaluating
from torchtune.modules import Pooling, TransformerDecoder, pooled_embeddings
from torchtune.rlhf.loss import pooled_scores
from torchtune.tokenizers import end_of_text
from torchtune.training.parallel import sequence_multiple
from torchtune.utils import decode_json

_PARTS = ("queries", "corpus", "relevant")


@torch.no_grad()
def embed(
    model: TransformerDecoder,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling = "last",
    instruction: str = "",
    dimensions: int | None = None,
    add_eos: bool | None = None,
    batch_size: int = 32,
) -> Tensor:
    """Embed texts, as :class:`torchtune.rlhf.loss.InfoNCELoss` trains it.

    Args:
        model: the decoder, possibly sharded or tensor parallel; it runs in evaluation mode. All ranks of a sharded one
            must embed the same texts.
        tokenizer: its tokenizer; texts are truncated to its ``max_seq_len``.
        texts: ``n`` texts.
        pooling: ``"last"``, the hidden state of the last token, or ``"mean"``, the mean over all tokens.
        instruction: text before every text, such as that of queries.
        dimensions: number of leading dimensions to keep, for models trained with ``matryoshka_dims``; by default all.
        add_eos: end every text with the EOS token; by default, texts end as the tokenizer's files say.
        batch_size: texts per forward pass.

    Returns:
        Vectors of length 1, float32 ``[n, d]``, on the host.

    Raises:
        EvaluationError: there is no text, or a text has no tokens.

    Example:
        >>> vectors = torchtune.evaluation.embed(model, tokenizer, ["the cat", "one dog"], pooling="mean")
        >>> vectors.shape
        torch.Size([2, 32])
    """
    if not texts:
        raise EvaluationError("embed: there is no text.")
    limit = getattr(tokenizer, "max_seq_len", None) or model.max_seq_len
    encode = getattr(tokenizer, "encode_text", tokenizer.encode)  # special tokens in a text are plain text
    end = end_of_text(tokenizer, add_eos)
    documents = []
    for number, text in enumerate(texts):
        tokens = list(encode(text=instruction + text, add_bos=True, add_eos=False))
        tokens = [*tokens[: limit - len(end)], *end]  # a truncated text ends as in training, too
        if not tokens:
            raise EvaluationError(f"embed: text {number} has no tokens: leave it out.")
        documents.append({"tokens": tokens, "labels": [CROSS_ENTROPY_IGNORE_IDX] * len(tokens)})
    device = model.tok_embeddings.weight.device
    vectors = []
    with evaluating(model):
        for start in tqdm(range(0, len(documents), batch_size), desc="Embedding", unit="batch", disable=None):
            batch = collate_documents(documents[start : start + batch_size])
            # Sequence parallelism splits the positions evenly over the ranks.
            batch = batch.pad_to_multiple(sequence_multiple(model)).to(device)
            hidden = model(**batch.model_inputs(), output="hidden")  # [1, t, d]
            embeddings = pooled_embeddings(hidden, batch, pooling)  # [n, d]
            vectors.append(embeddings[:, :dimensions].float().cpu())
    # After the other dimensions are cut off: the remaining ones are a vector of length 1.
    return F.normalize(torch.cat(vectors), dim=-1)


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a checkpoint embeds, as ``sentence-transformers`` stores it.

    Attributes:
        pooling: see :func:`embed`.
        query_instruction: text before queries.
        document_instruction: text before the texts of a corpus.
        add_eos: see :func:`embed`.

    Example:
        >>> torchtune.evaluation.EmbeddingSettings.of(checkpoint).pooling  # not an embedding model
        'last'
    """

    pooling: Pooling = "last"
    query_instruction: str = ""
    document_instruction: str = ""
    add_eos: bool | None = None

    @classmethod
    def of(cls, folder: str | Path) -> "EmbeddingSettings":
        """Read the settings of a checkpoint; the defaults for one that is not of an embedding model.

        Raises:
            EvaluationError: the checkpoint pools in another way, or a file is damaged.
        """
        path = Path(folder).expanduser()
        pooling_path = path / "1_Pooling" / "config.json"
        pooling: Pooling = "last"
        if pooling_path.is_file():
            config = read_object(pooling_path)
            # One entry per mode, or a single entry in later releases of sentence-transformers.
            modes = []
            for name, value in config.items():
                if name.startswith("pooling_mode_") and value is True:
                    modes.append(name)
            if "pooling_mode" in config:
                modes.append(config["pooling_mode"])
            if modes in (["pooling_mode_mean_tokens"], ["mean"]):
                pooling = "mean"
            elif modes not in (["pooling_mode_lasttoken"], ["lasttoken"]):
                raise EvaluationError(
                    f"{pooling_path}: it pools by {', '.join(map(str, modes)) or 'nothing'}: only the last token and "
                    "the mean are read."
                )
        prompts_path = path / "config_sentence_transformers.json"
        content = {}
        if prompts_path.is_file():
            content = read_object(prompts_path)
        prompts = content.get("prompts") or {}
        add_eos = content.get("add_eos")  # an entry of this library: sentence-transformers has no setting for it
        return cls(pooling, prompts.get("query", ""), prompts.get("document", ""), add_eos)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises :class:`EvaluationError` for anything else."""
    try:
        content = decode_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: it cannot be read as JSON ({error}): correct it.") from error
    if not isinstance(content, dict):
        raise EvaluationError(f"{path}: it must be a JSON object, not {type(content).__name__}.")
    return content


@dataclass(frozen=True)
class RetrievalData:
    """Queries, a corpus, and the texts of the corpus that are relevant to each query.

    Attributes:
        queries: ``n`` texts.
        corpus: ``m`` texts.
        relevant: for each query, the indices of the relevant texts, at least one.

    Example:
        >>> torchtune.evaluation.RetrievalData(["who?"], ["the cat", "one dog"], [[0]]).relevant
        [[0]]
    """

    queries: Sequence[str]
    corpus: Sequence[str]
    relevant: Sequence[Sequence[int]]


def read_retrieval(path: str | Path) -> RetrievalData:
    """Read queries, corpus and relevant texts.

    The file is a JSON object with ``queries`` and ``corpus``, texts by id, and ``relevant``, a list of ids of the
    corpus by id of a query. Or it has rows of queries with passages, as
    :func:`torchtune.datasets.embedding_dataset` reads them: the corpus is then all positives and negatives.

    Raises:
        EvaluationError: the file is neither, or an id is unknown.

    Example:
        >>> path = folder / "corpus.json"
        >>> text = '{"queries": {"q": "who?"}, "corpus": {"a": "the cat"}, "relevant": {"q": ["a"]}}'
        >>> _ = path.write_text(text)
        >>> torchtune.evaluation.read_retrieval(path).corpus
        ['the cat']
    """
    path = Path(path).expanduser()
    if not path.is_file() or not path.stat().st_size:
        raise EvaluationError(f"{path}: there is no such file, or it is empty: correct the path.")
    if path.suffix == ".json" and path.read_text(encoding="utf-8").lstrip().startswith("{"):
        content = read_object(path)
        missing = [name for name in _PARTS if name not in content]
        if missing:
            raise EvaluationError(f"{path}: there is no '{missing[0]}' in it: {', '.join(_PARTS)} are needed.")
        return _from_ids(path, content)
    return _from_rows(path, [row for _, row in read_rows(path)])


def _from_ids(path: Path, content: Mapping[str, Any]) -> RetrievalData:
    """Return the queries with relevant texts, of an object that maps ids; see :func:`read_retrieval`."""
    for name in _PARTS:
        if not isinstance(content[name], Mapping) or not content[name]:
            values = "lists of ids" if name == "relevant" else "texts"
            raise EvaluationError(f"{path}: '{name}' must map ids to {values}.")
    index_of = {key: index for index, key in enumerate(content["corpus"])}
    queries = []
    relevant = []
    for key, ids in content["relevant"].items():
        if key not in content["queries"]:
            raise EvaluationError(f"{path}: 'relevant' has the query '{key}', which is not in 'queries'.")
        if not ids:
            raise EvaluationError(f"{path}: 'relevant' of query '{key}' has nothing: leave it out.")
        indices = []
        for text_id in map(str, ids):  # keys of JSON objects are strings, ids in lists may be numbers
            if text_id not in index_of:
                raise EvaluationError(f"{path}: 'relevant' of query '{key}' has '{text_id}', which is not in 'corpus'.")
            indices.append(index_of[text_id])
        queries.append(content["queries"][key])
        relevant.append(indices)
    return RetrievalData(queries, list(content["corpus"].values()), relevant)


def _from_rows(path: Path, rows: Sequence[Any]) -> RetrievalData:
    """Return the queries of rows, and all their passages as the corpus, each once; see :func:`read_retrieval`."""
    index_of: dict[str, int] = {}  # text -> its index in the corpus
    relevant_of: dict[str, list[int]] = {}  # query -> indices of its positives
    for number, row in enumerate(rows, 1):
        row_format = RowFormat("no mapping")
        if isinstance(row, Mapping):
            row_format = format_of(row)
        if row_format.builder != "embedding_dataset":
            raise EvaluationError(
                f"{path}: row {number} is {row_format.kind}: give an object with queries, corpus and relevant, or rows "
                "of query and positive."
            )
        for name in ("query", "anchor", "question"):  # the format says that one of them is there
            if isinstance(row.get(name), str):
                query = row[name]
                break
        positive = index_of.setdefault(row["positive"], len(index_of))
        positives = relevant_of.setdefault(query, [])
        if positive not in positives:
            positives.append(positive)
        negatives = row.get("negatives") or row.get("negative") or []
        if isinstance(negatives, str):
            negatives = [negatives]
        for text in negatives:
            index_of.setdefault(text, len(index_of))
    return RetrievalData(list(relevant_of), list(index_of), list(relevant_of.values()))


def retrieval_scores(
    similarities: Tensor, relevant: Sequence[Sequence[int]], *, recall_at: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Score a ranking of a corpus for each query, as means over the queries.

    Args:
        similarities: of queries and texts of the corpus ``[n, m]``.
        relevant: for each query, the indices of the relevant texts.
        recall_at: numbers k of ``recall@k``.

    Returns:
        ``ndcg@10`` (gain 1 for a relevant text), ``mrr@10`` (1 / rank of the first relevant text, 0 below rank 10),
        and ``recall@k``, the fraction of the relevant texts among the first k.

    Example:
        >>> similarities = torch.tensor([[0.9, 0.5, 0.1]])
        >>> torchtune.evaluation.retrieval_scores(similarities, [[1]], recall_at=[1])["mrr@10"]
        0.5
    """
    num_ranked = min(max(10, *recall_at), similarities.shape[1])  # no score reads a lower rank
    ranking = similarities.topk(num_ranked, dim=1).indices.cpu()  # [n, num_ranked]
    is_relevant = torch.zeros_like(ranking, dtype=torch.bool)
    for query, indices in enumerate(relevant):
        is_relevant[query] = torch.isin(ranking[query], torch.tensor(indices))
    num_relevant = torch.tensor([len(indices) for indices in relevant])

    top = is_relevant[:, :10].double()  # [n, 10]
    ranks = torch.arange(1, top.shape[1] + 1, dtype=torch.float64)
    discounts = 1 / torch.log2(ranks + 1)
    # The best ranking has all relevant texts first, of which the first ten count.
    ideal = torch.stack([discounts[:count].sum() for count in num_relevant.tolist()])  # [n]
    scores = {
        "ndcg@10": float(((top * discounts).sum(1) / ideal).mean()),
        "mrr@10": float((top / ranks).amax(1).mean()),
    }
    for k in recall_at:
        recall = is_relevant[:, :k].sum(1).double() / num_relevant  # [n]
        scores[f"recall@{k}"] = float(recall.mean())
    return scores


def evaluate_retrieval(
    model: TransformerDecoder,
    tokenizer: Any,
    data: RetrievalData,
    *,
    settings: EmbeddingSettings | None = None,
    dimensions: int | None = None,
    recall_at: Sequence[int] = (1, 5, 10),
    batch_size: int = 32,
) -> dict[str, float]:
    """Embed queries and corpus, rank the corpus for each query by cosine similarity, and score the rankings.

    Args:
        model: the decoder.
        tokenizer: its tokenizer.
        data: from :func:`read_retrieval`.
        settings: how the model embeds; by default with its last token, without instructions.
        dimensions: see :func:`embed`.
        recall_at: see :func:`retrieval_scores`.
        batch_size: texts per forward pass.

    Returns:
        see :func:`retrieval_scores`.

    Example:
        >>> data = torchtune.evaluation.RetrievalData(["the cat"], ["the cat", "one dog"], [[0]])
        >>> torchtune.evaluation.evaluate_retrieval(model, tokenizer, data)["recall@1"]
        1.0
    """
    similarity = similarities(model, tokenizer, data, settings=settings, dimensions=dimensions, batch_size=batch_size)
    return retrieval_scores(similarity, data.relevant, recall_at=recall_at)


def similarities(
    model: TransformerDecoder,
    tokenizer: Any,
    data: RetrievalData,
    *,
    settings: EmbeddingSettings | None = None,
    dimensions: int | None = None,
    batch_size: int = 32,
) -> Tensor:
    """Return the cosine similarities of queries and corpus, float32 ``[n, m]``; see :func:`evaluate_retrieval`."""
    settings = settings or EmbeddingSettings()
    options = {
        "pooling": settings.pooling,
        "dimensions": dimensions,
        "add_eos": settings.add_eos,
        "batch_size": batch_size,
    }
    queries = embed(model, tokenizer, data.queries, instruction=settings.query_instruction, **options)
    corpus = embed(model, tokenizer, data.corpus, instruction=settings.document_instruction, **options)
    return queries @ corpus.T


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
