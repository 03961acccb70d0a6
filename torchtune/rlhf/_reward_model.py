"""Rewards of answers from a reward model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Message, collate_documents
from torchtune.rlhf._prompts import Prompt
from torchtune.rlhf._rollouts import Rollout, RolloutError, equal_chunks, texts_of
from torchtune.rlhf._scored_rollouts import ScoredRollouts
from torchtune.rlhf.loss.reward import pooled_scores
from torchtune.training import ParallelDims
from torchtune.utils import get_logger


class RewardModel:
    """Frozen reward model that scores answers, trained with :class:`torchtune.rlhf.loss.RewardLoss`.

    The score is read at the last token of the conversation, as in training. Chat templates may add tokens after the
    stop token of an answer, such as a line break. Such tokens are not sampled, so this class appends them.

    Args:
        model: model with one output.
        tokenizer: the policy's tokenizer.
        batch_size: number of answers per forward pass; None scores all answers in one pass.
        penalty: replaces the score of a penalized answer.
        penalise_no_eos: whether to penalize unfinished answers.
        min_response_length: minimum number of tokens in an answer; shorter answers are penalized.
        dims: parallel dims of a sharded model, in which all ranks must score answers together. None: one process.

    Attributes:
        closing: tokens appended to a finished answer.

    Raises:
        RolloutError: the model does not have exactly one output.

    Example:
        >>> scorer = torchtune.rlhf.RewardModel(judge, tokenizer, penalise_no_eos=True)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        batch_size: int | None = None,
        penalty: float = -3.0,
        penalise_no_eos: bool = False,
        min_response_length: int | None = None,
        *,
        dims: ParallelDims | None = None,
    ) -> None:
        self._dims = ParallelDims() if dims is None else dims
        rows = model.output.weight.shape[0]
        if rows != 1:
            raise RolloutError(
                f"reward_and_value_model: a reward is one number, but the model ends in {rows:,} outputs: set "
                "_component_ to torchtune.modules.classifier_model with num_classes=1 and base_model_path the builder."
            )
        self.model, self._batch_size = model.requires_grad_(False).eval(), batch_size
        self._stop, self.closing = set(tokenizer.stop_tokens), _closing_tokens(tokenizer)
        self._penalty, self._requires_eos, self._min_length = penalty, penalise_no_eos, min_response_length or 0
        self._num_penalized = 0  # number of consecutive calls in which every answer was penalized

    @torch.no_grad()
    def __call__(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Score prompts with their answers; returns float64 ``[n]`` on the host."""
        device, found = self.model.tok_embeddings.weight.device, []
        for part in equal_chunks(rollouts, self._batch_size, self._dims):
            documents = []
            for rollout in part:
                closing = self.closing if int(rollout.tokens[-1]) in self._stop else []
                tokens = torch.cat([rollout.tokens, torch.tensor(closing, dtype=torch.int64)])
                documents.append({"tokens": tokens, "labels": torch.full_like(tokens, CROSS_ENTROPY_IGNORE_IDX)})
            batch = collate_documents(documents).to(device)
            hidden = self.model(**batch.model_inputs(), output="hidden")
            found.append(pooled_scores(hidden, batch, self.model.output).double().cpu())
        return torch.cat(found)[: len(rollouts)]

    def apply_penalty(self, rollouts: Sequence[Rollout], scores: Tensor) -> Tensor:
        """Return the scores ``[n]``; the penalty replaces the scores of penalized answers."""
        faulty = [(self._requires_eos and not one.finished) or len(one.answer) < self._min_length for one in rollouts]
        self._num_penalized = self._num_penalized + 1 if all(faulty) else 0
        if self._num_penalized in (1, 10, 100):
            get_logger().warning(
                f"All {len(faulty)} answers get reward_penalty ({self._num_penalized} times in a row now), of which "
                f"{sum(not one.finished for one in rollouts)} have not ended: no score counts, so raise "
                "max_generated_tokens, or set penalise_no_eos=False."
            )
        return scores.masked_fill(torch.tensor(faulty), self._penalty)


def _closing_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that the chat template adds after the stop token of the last answer."""
    messages = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    tokens = [int(token) for token in tokenizer({"messages": messages})["tokens"]]
    ends = [place for place, token in enumerate(tokens) if token in set(tokenizer.stop_tokens)]
    return tokens[ends[-1] + 1 :] if ends else []


def judge_rollouts(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], reward_model: RewardModel, tokenizer: Any
) -> ScoredRollouts:
    """Score one answer to each prompt.

    Args:
        prompts: ``n`` prompts.
        rollouts: ``n`` answers.
        reward_model: the reward model.
        tokenizer: the policy's tokenizer.

    Returns:
        Rewards ``[n, 1]``, with penalties, and the reward model's scores as ``parts["score"]``.

    Raises:
        RolloutError: a score is not finite.
    """
    scores = reward_model(rollouts)
    if not scores.isfinite().all():
        at = int((~scores.isfinite()).nonzero()[0])
        raise RolloutError(
            f"reward_checkpointer: the score of the answer to row {prompts[at].number} is {scores[at]}: the reward "
            "model is damaged, or needs dtype=fp32."
        )
    rewards, texts = reward_model.apply_penalty(rollouts, scores), texts_of(rollouts, tokenizer)
    return ScoredRollouts(list(prompts), list(rollouts), texts, rewards[:, None], {"score": scores.tolist()})
