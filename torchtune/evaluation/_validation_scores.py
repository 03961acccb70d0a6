"""Scores of greedy answers to the first rows of the validation data, while a run trains."""

import math
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from torchtune.data import BatchLoader
from torchtune.evaluation._eval_rows import EvalRow, EvaluationError, row_of_conversation
from torchtune.evaluation._retrieval import EmbeddingSettings, RetrievalData, evaluate_retrieval, read_retrieval
from torchtune.evaluation._score_answers import check_scores, make_scores, mean_and_error, scored_text, tool_format_of
from torchtune.generation import (
    answer_limit,
    check_generates,
    images_of_row,
    stream_answers,
    tokenize_prompt,
)
from torchtune.modules import text_decoder
from torchtune.rlhf import RewardSum
from torchtune.rlhf.reward_functions import Reward
from torchtune.supervision import observe_together
from torchtune.training import undisturbed_random_state
from torchtune.training.parallel import ParallelDims, broadcast_object
from torchtune.utils import ObserverGuard, UserError, get_logger, is_simulated, log_rank_zero, sign_of_life

_SETTING = "dataset_val"  # names the rows in messages
_RETRIEVAL = "retrieval:"  # before the file of a corpus
RETRIEVAL_SCORES = ("ndcg@10", "mrr@10", "recall@1", "recall@5", "recall@10")


def check_score_names(names: Sequence[str]) -> list[Reward]:
    """Return the scores of answers in the setting ``scores``; see :func:`make_scores`.

    ``retrieval:FILE`` is not a score of answers; its file is checked.

    Raises:
        EvaluationError: there is no such score or file, its metric would have the name of the validation loss, or there
            are two files.
    """
    _read_corpus(names)
    try:
        scores = make_scores([name for name in names if not name.startswith(_RETRIEVAL)])
    except EvaluationError as error:
        raise EvaluationError(f"scores: {error}") from error
    if any(score.name == "loss" for score in scores):
        raise EvaluationError(
            "scores: 'loss' would be logged as val_loss, the loss of validation: rename the function."
        )
    return scores


def _read_corpus(names: Sequence[str]) -> RetrievalData | None:
    """Read the file of ``retrieval:FILE``; None if there is none."""
    files = [name.removeprefix(_RETRIEVAL) for name in names if name.startswith(_RETRIEVAL)]
    if not files:
        return None
    if len(files) > 1:
        raise EvaluationError(f"scores: {len(files)} files are named with {_RETRIEVAL}, but one is measured: name one.")
    try:
        return read_retrieval(files[0])
    except EvaluationError as error:
        raise EvaluationError(f"scores: {error}") from error


class ValidationScores:
    """Scores of a model's greedy answers to the first rows of the validation data, as ``tune eval`` computes them.

    ``retrieval:FILE`` measures what an embedding model retrieves of a small corpus instead: ``val_ndcg@10``,
    ``val_mrr@10`` and ``val_recall@k``, as ``tune eval --retrieval`` does.

    All ranks generate all answers, or embed all texts, together, so that the scores do not depend on their number; rank
    0 calls the scores. Measuring changes neither the model nor the random state. What fails is logged once, and the run
    goes on.

    Args:
        names: the scores, see :func:`make_scores`; without any, nothing is measured.
        loader_val: loader of the validation data, or None.
        model: the trained model.
        tokenizer: tokenizer of the run.
        dims: processes of the run.
        rows: number of rows to answer.
        max_new_tokens: maximum length of an answer; longer ones are truncated and scored.
        loss: loss of the run, which says how an embedding model pools.

    Raises:
        EvaluationError: a score does not exist or cannot read a row, the rows are not conversations, or a corpus is
            given in a run that trains no embeddings.
        GenerationError: the model is a classifier or a reward model.

    Example:
        >>> dims = torchtune.training.ParallelDims()
        >>> torchtune.evaluation.ValidationScores([], None, model, tokenizer, dims).measure()
        {}
    """

    def __init__(
        self,
        names: Sequence[str],
        loader_val: BatchLoader | None,
        model: torch.nn.Module,
        tokenizer: Any,
        dims: ParallelDims,
        *,
        rows: int = 16,
        max_new_tokens: int = 128,
        loss: Any = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._dims = dims
        self._max_new_tokens = max_new_tokens
        self._scores: list[Reward] = []
        self._corpus: RetrievalData | None = None
        if not names or loader_val is None or is_simulated():  # a simulation has no rows, and generates nothing
            return
        self._scores = check_score_names(names)
        self._corpus = _read_corpus(names)
        if self._corpus is not None:
            self._embedding = _embedding_settings(loss, loader_val)
            self._retrieval_guard = ObserverGuard("scores: the retrieval")
        if not self._scores:
            return
        check_generates(model)
        for attribute in ("decode", "stop_tokens"):
            if not hasattr(tokenizer, attribute):
                raise EvaluationError(
                    f"scores: the tokenizer, a {type(tokenizer).__name__}, has no {attribute}, which answers need: add "
                    "it, or leave scores out."
                )
        self._answers_guard = ObserverGuard("scores: the generation of answers")
        self._score_guards = {score.name: ObserverGuard(f"scores: '{score.name}'") for score in self._scores}
        self._rows = _first_rows(loader_val, rows)
        check_scores(
            self._scores,
            self._rows,
            _SETTING,
            remedy="correct the row, or leave the score out: it needs a right answer",
        )
        self._tool_format = tool_format_of(tokenizer, self._rows, _SETTING)
        self._tokenize_prompts()

    def _tokenize_prompts(self) -> None:
        """Tokenize the prompts; leave out rows that cannot be answered, and log their number."""
        prompts: list[tuple[EvalRow, dict[str, Any], int]] = []
        reasons = []
        for row in self._rows:
            try:
                tokenized = tokenize_prompt(self._model, self._tokenizer, row, _SETTING)
                limit = answer_limit(
                    text_decoder(self._model), tokenized["tokens"], self._max_new_tokens, f"{_SETTING}, line {row.line}"
                )
            except UserError as error:
                reasons.append(str(error).rstrip("."))
                continue
            prompts.append((row, tokenized, limit))
        if not prompts:
            raise EvaluationError(f"scores: none of the first {len(self._rows)} rows can be answered: {reasons[0]}.")
        if reasons:
            text = f"scores: {len(reasons)} of the first {len(self._rows)} rows are left out; the first: {reasons[0]}."
            log_rank_zero(get_logger(), text)
        self._rows = [row for row, _, _ in prompts]
        self._prompts = [tokenized for _, tokenized, _ in prompts]
        self._limits = [limit for _, _, limit in prompts]

    def measure(self) -> dict[str, float]:
        """Return the mean of each score over the rows, as ``val_<score>``; NaN if it failed. A collective."""
        metrics: dict[str, float] = {}
        if self._corpus is not None:

            def retrieve() -> dict[str, float]:
                return evaluate_retrieval(self._model, self._tokenizer, self._corpus, settings=self._embedding)

            with undisturbed_random_state():
                corpus_scores = observe_together(self._retrieval_guard, retrieve, self._dims)
            # None if the retrieval failed on a rank; its guard has warned.
            corpus_scores = broadcast_object(corpus_scores) or dict.fromkeys(RETRIEVAL_SCORES, math.nan)
            for name, score in corpus_scores.items():
                metrics[f"val_{name}"] = score
        if not self._scores:
            return metrics
        means = None
        with undisturbed_random_state():
            texts = observe_together(self._answers_guard, self._generate, self._dims)  # None if it failed on a rank
            if texts is not None and self._dims.is_main:
                means = [self._mean(score, texts) for score in self._scores]
        # One opinion for all ranks, because they decide together about the best checkpoint and the end of the run.
        means = broadcast_object(means)
        if means is None:
            means = [math.nan] * len(self._scores)
        for score, mean in zip(self._scores, means, strict=True):
            metrics[f"val_{score.name}"] = mean
        return metrics

    def _generate(self) -> list[str]:
        """Return the answer to each row, as it is scored. A collective."""
        device = text_decoder(self._model).tok_embeddings.weight.device
        texts = {}
        ended = stream_answers(
            self._model,
            self._tokenizer,
            self._rows,
            [prompt["tokens"] for prompt in self._prompts],
            self._limits,
            max_new_tokens=self._max_new_tokens,
            images=[images_of_row(prompt, device) for prompt in self._prompts],
            temperature=0.0,
        )
        with closing(ended):
            for row, text, _, _ in ended:
                texts[row.line] = scored_text(row, text, self._tool_format)
                sign_of_life()  # the watchdog sees no steps meanwhile
        return [texts[row.line] for row in self._rows]

    def _mean(self, score: Reward, texts: list[str]) -> float:
        """Return the mean of a score over the rows that it scores."""

        def call() -> float:
            rewards = RewardSum([score], setting="score")  # checks the values; its errors name the rows
            columns = [row.row for row in self._rows]
            lines = [row.line for row in self._rows]
            scores = rewards(columns, texts, lines)
            mean, _ = mean_and_error(scores.parts[score.name])
            return mean

        return self._score_guards[score.name].call(call, default=math.nan)


def _embedding_settings(loss: Any, loader_val: BatchLoader) -> EmbeddingSettings:
    """Return how the model of a run embeds: the pooling of its loss, and the texts around those of its data."""
    pooling = getattr(loss, "pooling", None)
    if pooling is None:
        raise EvaluationError(
            f"scores: {_RETRIEVAL}FILE measures embeddings, which {type(loss).__name__} does not train: use "
            "torchtune.rlhf.loss.InfoNCELoss, or leave it out."
        )
    dataset = loader_val.dataset.row_datasets()[0]
    return EmbeddingSettings(
        pooling=pooling,
        query_instruction=dataset.instructions.get("query", ""),
        document_instruction=dataset.instructions.get("document", ""),
        add_eos=dataset.add_eos,
    )


def _first_rows(loader_val: BatchLoader, count: int) -> list[EvalRow]:
    """Return the first rows of the validation data that have a turn to answer.

    Raises:
        EvaluationError: the rows are not conversations.
    """
    rows: list[EvalRow] = []
    for dataset in loader_val.dataset.row_datasets():
        conversations = dataset.first_conversations(count - len(rows))
        if conversations is None:
            raise EvaluationError(
                f"scores: the rows of {_SETTING} ({type(dataset).__name__}) are not conversations or questions, so "
                "that there is nothing to answer: use a dataset of conversations, or leave scores out."
            )
        for number, columns, conversation in conversations:
            rows.append(row_of_conversation(number, columns, conversation, f"{_SETTING}, line {number + 1}"))
    return rows
