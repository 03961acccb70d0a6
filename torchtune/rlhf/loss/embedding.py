"""Contrastive loss of embedding models, and scores of large batches in parts, with cached gradients."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import Batch, BatchLoader, DataError, ExampleDataset
from torchtune.modules import Pooling, pooled_embeddings
from torchtune.modules.loss import LossError, Projection
from torchtune.modules.moe.balance import balance_of
from torchtune.rlhf.loss._base import AnswerLoss, Metrics
from torchtune.training import RNGState, undisturbed_random_state
from torchtune.utils import is_simulated

# Modules of sentence-transformers, in order -> their folders in a checkpoint.
_MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}

# Scores the documents of a part [n, ...].
Score = Callable[[Batch], Tensor]


class InfoNCELoss(AnswerLoss):
    """−log softmax of cos(q, p) / temperature, for a query q and its positive p among all passages of the batch.

    The candidates of a query are the positives and negatives of all examples in the micro-batch, on all data-parallel
    ranks. So a larger ``batch_size`` is a harder task, and gradient accumulation is not the same as a larger batch. A
    copy of a query's positive elsewhere in the batch is not a candidate.

    This is ``MultipleNegativesRankingLoss`` of ``sentence-transformers`` with ``scale = 1 / temperature`` and, with
    ``matryoshka_dims``, ``MatryoshkaLoss``: the weighted sum of the losses of the embeddings' first dimensions.

    Args:
        temperature: divides the cosine similarities.
        pooling: embedding of a text: the hidden state of its last token (``last``), or the mean over its tokens
            (``mean``).
        matryoshka_dims: numbers of leading dimensions that are trained as embeddings of their own; by default only all
            dimensions.
        matryoshka_weights: weight of each of ``matryoshka_dims``; by default 1.
        texts_per_pass: number of texts in a forward pass, for batches larger than memory (cached gradients, Gao et al.
            2021, arXiv:2101.06983). Every text is computed twice, and the gradients are those of the whole batch. By
            default, all texts of a micro-batch are in one pass.

    Raises:
        ValueError: a number is not above 0, there is another number of weights than of dimensions, or ``pooling`` is
            unknown.

    Example:
        >>> torchtune.rlhf.loss.InfoNCELoss(temperature=0.05, matryoshka_dims=[64, 32]).matryoshka_weights
        [1.0, 1.0]
    """

    trains_on = "retrieval"
    needs_reference: ClassVar[bool] = False
    rows_per_loss: ClassVar[int] = 4

    def __init__(
        self,
        temperature: float = 0.05,
        pooling: Pooling = "last",
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
        texts_per_pass: int | None = None,
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}: it must be above 0.")
        if pooling not in ("last", "mean"):
            raise ValueError(f"pooling is {pooling!r}: it must be 'last' or 'mean'.")
        dims = list(matryoshka_dims or ())
        weights = [1.0] * len(dims)
        if matryoshka_weights is not None:
            weights = list(matryoshka_weights)
        if len(weights) != len(dims):
            raise ValueError(f"matryoshka_weights has {len(weights)} weights for {len(dims)} matryoshka_dims.")
        if min([*dims, *weights], default=1) <= 0:  # the default is for no dimensions, which are valid
            raise ValueError("matryoshka_dims and matryoshka_weights must be above 0.")
        if texts_per_pass is not None and texts_per_pass < 1:
            raise ValueError(f"texts_per_pass is {texts_per_pass}: it must be at least 1.")
        self.temperature = temperature
        self.pooling = pooling
        self.matryoshka_dims = dims
        self.matryoshka_weights = weights
        self.texts_per_pass = texts_per_pass

    def check_model(self, model: nn.Module) -> None:
        """Check that the embeddings have the Matryoshka dimensions, and the passes no balancing loss.

        Raises:
            LossError: a number of ``matryoshka_dims`` exceeds the model's width, or ``texts_per_pass`` is set and the
                experts have a balancing loss.
        """
        width = model.tok_embeddings.weight.shape[1]
        too_wide = [dim for dim in self.matryoshka_dims if dim > width]
        if too_wide:
            raise LossError(
                f"loss: matryoshka_dims has {max(too_wide)}, but the model's embeddings have {width} dimensions: set "
                "numbers up to this."
            )
        if self.texts_per_pass is not None and balance_of(model) is not None:
            raise LossError(
                "loss: texts_per_pass computes texts without a graph at first, in which the balancing loss of the "
                "experts has no gradient: remove BalancingLoss from model_converters, or texts_per_pass."
            )

    def check_batch(self, batch: Batch) -> None:
        """Check that the batch has queries with passages. Raises :class:`DataError`."""
        missing = {"role", "digest", "counts"} - batch.per_document.keys()
        if missing:
            raise DataError(
                f"loss: InfoNCELoss reads queries with passages, but the batch has no '{min(missing)}' per document: "
                "use torchtune.datasets.embedding_dataset with collate_fn=torchtune.data.collate_embedding."
            )

    def check_loader(self, loader: BatchLoader, name: str) -> None:
        """Check that every micro-batch has something to contrast with. Raises :class:`LossError`.

        Args:
            loader: loader of the examples.
            name: name of the setting with its batch size.
        """
        if loader.smallest_micro_batch > 1:
            # A query has the positives of others to contrast with, unless all rows have the same one.
            if is_simulated():  # all rows of a simulation are equal
                return
            first = loader.dataset[0]["positive"]
            for index in range(len(loader.dataset)):
                example = loader.dataset[index]
                if example["negatives"] or example["positive"] != first:
                    return
            raise LossError(
                f"{name}: InfoNCELoss contrasts a query with the passages of other queries, but all "
                f"{len(loader.dataset):,} examples have the same positive, and no negatives: give rows with other "
                "passages, or with negatives."
            )
        # Any row may be alone in the micro-batch. Without negatives, its loss is 0 whatever the model is.
        num_alone = 0
        for index in range(len(loader.dataset)):
            if not loader.dataset[index]["negatives"]:
                num_alone += 1
        if num_alone == 0:
            return
        raise LossError(
            f"{name}: InfoNCELoss contrasts a query with the passages of other queries, but of {len(loader.dataset):,} "
            f"examples in micro-batches of {loader.batch_size} on {loader.world_size} process(es) the smallest "
            f"micro-batch has 1, and {num_alone:,} of the examples have no negatives: set another {name}, or give all "
            "rows negatives."
        )

    def score_batch(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the embedding of every document ``[n, d]``; see :meth:`AnswerLoss.score_batch`."""
        if self.texts_per_pass is None:
            return super().score_batch(model, batch)

        def score(part: Batch) -> Tensor:
            return super(InfoNCELoss, self).score_batch(model, part.pad_to_multiple(self.dims.min_seq_len_divisor))

        return score_in_parts(score, batch, self.texts_per_pass, self.dims.max)

    def score(self, hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
        """Return the embedding of every document before normalization ``[n, d]``, float32 or wider.

        See :meth:`AnswerLoss.score`; the projection to the vocabulary is not used.
        """
        embeddings = pooled_embeddings(hidden, batch, self.pooling)
        if self.dims.tp == 1:
            return embeddings
        # All tensor-parallel ranks compute the same loss, and the gradients of hidden states are summed over them.
        values = embeddings.detach()
        return values + (embeddings - values) / self.dims.tp

    def extra_files(self, model: nn.Module, dataset: ExampleDataset, tokenizer: Any) -> dict[str, Any]:
        """Return the files from which ``sentence-transformers`` loads the checkpoint, by path.

        Its ``encode(texts, prompt_name="query")`` then adds the instruction of the dataset.
        """
        instructions = [part.instructions for part in dataset.row_datasets()]
        prompts = {}
        if all(texts == instructions[0] for texts in instructions):  # a mixture may have several
            prompts = dict(instructions[0])
        # Whether texts end otherwise than the tokenizer's files say, for this library.
        choices_of_end = {part.add_eos for part in dataset.row_datasets()}
        ends = {}
        for adds_eos in (True, False):
            if choices_of_end == {adds_eos}:  # a mixture may have both
                ends["add_eos"] = adds_eos
        modules = []
        for number, (name, path) in enumerate(_MODULES.items()):
            kind = f"sentence_transformers.models.{name}"
            modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
        return {
            "modules.json": modules,
            "sentence_bert_config.json": {
                "max_seq_length": getattr(tokenizer, "max_seq_len", None),
                "do_lower_case": False,
            },
            "config_sentence_transformers.json": {
                "prompts": prompts,
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
                **ends,
            },
            "1_Pooling/config.json": {
                "word_embedding_dimension": model.tok_embeddings.weight.shape[1],
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": self.pooling == "mean",
                "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False,
                "pooling_mode_weightedmean_tokens": False,
                "pooling_mode_lasttoken": self.pooling == "last",
                "include_prompt": True,  # the mean is over the tokens of the instruction, too, as in training
            },
            "2_Normalize/config.json": {},
        }

    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Sum the loss over the queries of this rank, and return metrics; see :meth:`AnswerLoss.sum_and_metrics`.

        The metrics rank a query's positive among its candidates: ``retrieval/accuracy``, how often it is the first, and
        ``retrieval/mrr``, the mean of 1 / rank. ``similarity/positive`` is the mean cosine of queries and positives.
        """
        self.check_batch(batch)
        # `collate_embedding` puts the queries (role 0) first, then their positives in the same order, then negatives.
        num_queries = int((batch.per_document["role"] == 0).sum())
        queries = scores[:num_queries]  # [q, d]
        counts = batch.per_document["counts"][:num_queries]  # [q], bool, False for fillers
        # The passages of all data-parallel ranks: ``first`` is the positive of this rank's first query.
        passages, first = self.dims.gather_over_data(scores[num_queries:])  # [c, d]
        # Equal texts have equal digests: a copy of a query's positive must not be its negative.
        digests, _ = self.dims.gather_over_data(batch.per_document["digest"][num_queries:])  # [c]
        passage_counts, _ = self.dims.gather_over_data(batch.per_document["counts"][num_queries:])  # [c]

        targets = first + torch.arange(num_queries, device=scores.device)  # [q], each query's positive
        is_target = F.one_hot(targets, len(passages)).bool()  # [q, c]
        is_copy = digests[targets][:, None] == digests[None]
        # Fillers of ranks without data are not candidates of others. A filler's own positive stays: its loss is
        # finite, and is then multiplied by 0.
        excluded = (is_copy | ~passage_counts) & ~is_target

        losses = torch.zeros_like(queries[:, 0])
        width = scores.shape[1]  # without matryoshka_dims, the whole embedding is the only one
        dims = self.matryoshka_dims or [width]
        weights = self.matryoshka_weights or [1.0]
        for dim, weight in zip(dims, weights, strict=True):
            similarities = _cosines(queries[:, :dim], passages[:, :dim])
            logits = (similarities / self.temperature).masked_fill(excluded, -torch.inf)
            losses = losses + weight * F.cross_entropy(logits, targets, reduction="none")

        with torch.no_grad():
            similarities = _cosines(queries, passages)
            positives = similarities.gather(1, targets[:, None])  # [q, 1]
            is_above = (similarities > positives) & ~excluded
            ranks = 1 + is_above.sum(1)  # [q]
        figures = {
            "retrieval/accuracy": (ranks == 1).float(),
            "retrieval/mrr": 1.0 / ranks,
            "similarity/positive": positives[:, 0].float(),
        }
        num_terms = counts.sum()
        metrics = {}
        for name, values in figures.items():
            metrics[name] = (torch.where(counts, values, 0.0).sum(), num_terms)
        return self.total(losses, counts), metrics


def _cosines(queries: Tensor, passages: Tensor) -> Tensor:
    """Return cosine similarities ``[q, c]``."""
    queries = F.normalize(queries, dim=-1)
    passages = F.normalize(passages, dim=-1)
    return queries @ passages.T


def score_in_parts(score: Score, batch: Batch, size: int, num_passes: Callable[[int], int]) -> Tensor:
    """Score a batch in parts, each with two forward passes (GradCache; Gao et al. 2021, arXiv:2101.06983).

    The first pass keeps nothing for the backward pass. The backward pass computes each part again, with the same random
    numbers, and adds its gradients to those of the parameters before it computes the next part.

    Args:
        score: scores the documents of a part ``[n, ...]``.
        batch: the whole batch.
        size: number of documents of a part.
        num_passes: given the number of parts, returns the number of passes, which is the same on all ranks: passes of
            sharded models are collectives.

    Returns:
        The scores of all documents.
    """
    parts = batch.split_documents(size)
    fillers = [parts[0]] * (num_passes(len(parts)) - len(parts))
    if not torch.is_grad_enabled():
        scores = [score(part) for part in [*parts, *fillers]]
        return torch.cat(scores[: len(parts)])
    # Autograd calls the backward pass only where an input needs gradients, and the parameters are not inputs.
    trigger = torch.zeros((), device=batch.tokens.device, requires_grad=True)
    return _TwoPasses.apply(trigger, score, parts, fillers)


class _TwoPasses(torch.autograd.Function):
    """Scores parts without a graph; the backward pass scores each part again, with one."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, score: Score, parts: Sequence[Batch], fillers: Sequence[Batch]) -> Tensor:
        ctx.score = score
        ctx.parts = [*parts, *fillers]
        ctx.random_states = []
        scores = []
        for part in ctx.parts:
            ctx.random_states.append(RNGState().state_dict())  # dropout draws the same numbers again
            scores.append(score(part))
        ctx.num_documents = [len(part_scores) for part_scores in scores[: len(parts)]]
        return torch.cat(scores[: len(parts)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        gradients = list(gradient.split(ctx.num_documents))
        with undisturbed_random_state():
            for index, part in enumerate(ctx.parts):
                RNGState().load_state_dict(ctx.random_states[index])
                with torch.enable_grad():
                    scores = ctx.score(part)
                if index < len(gradients):
                    scores_gradient = gradients[index]
                else:  # a filler, whose backward pass other ranks wait for
                    scores_gradient = torch.zeros_like(scores)
                torch.autograd.backward(scores, scores_gradient)
        return None, None, None, None
