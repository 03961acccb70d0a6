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
        num_outputs = model.output.weight.shape[0]
        if num_outputs != 1:
            raise RolloutError(
                f"reward_and_value_model: a reward is one number, but the model ends in {num_outputs:,} outputs: set "
                "_component_ to torchtune.modules.classifier_model with num_classes=1 and base_model_path the builder."
            )
        self.model = model.requires_grad_(False).eval()
        self._batch_size = batch_size
        self._stop_tokens = set(tokenizer.stop_tokens)
        # What the chat template adds after the last stop token of a conversation that ends with an answer. Earlier
        # stop tokens may end the user's turn, so the loop overwrites what follows them.
        messages = [Message(role="user", content="a"), Message(role="assistant", content="b")]
        conversation = [int(token) for token in tokenizer({"messages": messages})["tokens"]]
        self.closing: list[int] = []
        for position, token in enumerate(conversation):
            if token in self._stop_tokens:
                self.closing = conversation[position + 1 :]
        self._penalty = penalty
        self._penalize_unfinished = penalise_no_eos
        self._min_length = min_response_length or 0
        self._num_penalized = 0  # number of consecutive calls in which every answer was penalized

    @torch.no_grad()
    def __call__(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Score prompts with their answers; returns float64 ``[n]`` on the host."""
        device = self.model.tok_embeddings.weight.device
        closing_tokens = torch.tensor(self.closing, dtype=torch.int64)
        scores = []
        for chunk in equal_chunks(rollouts, self._batch_size, self._dims):
            documents = []
            for rollout in chunk:
                tokens = rollout.tokens
                if int(tokens[-1]) in self._stop_tokens:  # an unfinished answer is scored at its last token
                    tokens = torch.cat([tokens, closing_tokens])
                # `collate_documents` needs labels, which the score does not read.
                documents.append({"tokens": tokens, "labels": torch.full_like(tokens, CROSS_ENTROPY_IGNORE_IDX)})
            batch = collate_documents(documents).to(device)
            hidden = self.model(**batch.model_inputs(), output="hidden")  # [1, s, d]
            scores.append(pooled_scores(hidden, batch, self.model.output).double().cpu())
        # Chunks after the last rollout are fillers, for ranks with fewer rollouts than others.
        return torch.cat(scores)[: len(rollouts)]

    def apply_penalty(self, rollouts: Sequence[Rollout], scores: Tensor) -> Tensor:
        """Return the scores ``[n]``; the penalty replaces the scores of penalized answers."""
        penalized = []
        num_unfinished = 0
        num_short = 0
        for rollout in rollouts:
            is_unfinished = self._penalize_unfinished and not rollout.finished
            is_short = len(rollout.answer) < self._min_length
            penalized.append(is_unfinished or is_short)
            num_unfinished += is_unfinished
            num_short += is_short
        # Equal scores teach nothing: at the 1st, 10th and 100th such call in a row, the log says so.
        if all(penalized):
            self._num_penalized += 1
        else:
            self._num_penalized = 0
        if self._num_penalized in (1, 10, 100):  # not at every call
            # An answer may be both.
            reasons = []
            remedies = []
            if num_unfinished:
                reasons.append(f"{num_unfinished} have not ended")
                remedies.append("raise max_generated_tokens, or set penalise_no_eos=False")
            if num_short:
                reasons.append(f"{num_short} are shorter than min_response_length={self._min_length}")
                remedies.append("lower min_response_length")
            get_logger().warning(
                f"All {len(penalized)} answers get reward_penalty ({self._num_penalized} times in a row now), of which "
                f"{' and '.join(reasons)}: no score counts, so {', and '.join(remedies)}."
            )
        return scores.masked_fill(torch.tensor(penalized, device=scores.device), self._penalty)


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
    scores = reward_model(rollouts)  # checked before penalties replace some of them
    damaged = ~scores.isfinite()
    if damaged.any():
        index = int(damaged.nonzero()[0])
        raise RolloutError(
            f"reward_checkpointer: the score of the answer to row {prompts[index].number} is {scores[index]}: the "
            "reward model is damaged, or needs dtype=fp32."
        )
    rewards = reward_model.apply_penalty(rollouts, scores)
    return ScoredRollouts(
        prompts=list(prompts),
        rollouts=list(rollouts),
        texts=texts_of(rollouts, tokenizer),
        rewards=rewards[:, None],  # [n, 1]: one answer per prompt
        parts={"score": scores.tolist()},
    )
