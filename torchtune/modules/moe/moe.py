"""Mixtures of experts (MoE)."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.moe.frozen_experts import Selection
from torchtune.modules.rms_norm import rms_norm
from torchtune.utils import in_backward_pass


class TokenChoiceTopKRouter(nn.Module):
    """Top-k router: each token selects the k experts with the highest scores (Shazeer et al. 2017, arXiv:1701.06538).

    Args:
        gate: projection ``d -> e``; its outputs become scores in float32.
        dim: width d of the tokens.
        num_experts: number e of experts.
        experts_per_token: number k of experts that each token selects.
        score_function: softmax over all experts, or sigmoid per expert.
        normalize: divide the scores of the selected experts by their sum.
        sum_eps: added to the sum for ``normalize``.
        scale: factor of the final scores.
        selection_bias: add a bias to the scores for the selection only (Wang et al. 2024, arXiv:2408.15664): a
            parameter ``selection_bias``, float32 ``[e]``, without gradient.
        groups: number of expert groups of equal size.
        top_groups: number of groups from which a token selects experts: the groups with the highest sum of their two
            best scores.
        norm_eps: normalize tokens to length 1 before ``gate`` (RMSNorm with this eps, divided by √d), and scale them by
            the parameter ``channel_scale`` ``[d]``. The parameter ``expert_scale`` ``[e]`` scales the final scores.
            None: no normalization and no scaling.

    Raises:
        ValueError: ``experts_per_token`` exceeds ``num_experts``.

    Example:
        >>> from torchtune.modules.moe import TokenChoiceTopKRouter
        >>> gate = torch.nn.Linear(8, 4, bias=False)
        >>> router = TokenChoiceTopKRouter(gate=gate, dim=8, num_experts=4, experts_per_token=2)
        >>> router(torch.randn(3, 8))[0].shape
        torch.Size(...)
    """

    def __init__(
        self,
        *,
        gate: nn.Module,
        dim: int,
        num_experts: int,
        experts_per_token: int,
        score_function: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = False,
        sum_eps: float = 0.0,
        scale: float = 1.0,
        selection_bias: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(f"experts_per_token is {experts_per_token}, with {num_experts} experts to choose from.")
        self.gate = gate
        self.dim = dim
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.score_function = score_function
        self.normalize = normalize
        self.sum_eps = sum_eps
        self.scale = scale
        self.groups = groups
        self.top_groups = top_groups
        self.balance: Any = None  # set by torchtune.modules.moe.balance.BalancingLoss
        self.tokens_per_expert: Tensor | None = None  # int64 [e], since training began; None before the first call
        self.selection_bias = None
        if selection_bias:
            self.selection_bias = nn.Parameter(torch.zeros(num_experts, dtype=torch.float32), requires_grad=False)
        self.norm_eps = norm_eps
        self.channel_scale = None
        self.expert_scale = None
        if norm_eps is not None:
            self.channel_scale = nn.Parameter(torch.ones(dim))
            self.expert_scale = nn.Parameter(torch.ones(num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Select experts for each token.

        Args:
            x: tokens ``[t, d]``.

        Returns:
            Scores of the selected experts, float32 ``[t, k]``; indices of the selected experts, int64 ``[t, k]``;
            tokens per expert, int64 ``[e]``.
        """
        if self.norm_eps is not None:
            # RMSNorm makes a token √d long: the factor makes it as long as 1.
            x = rms_norm(x, self.norm_eps) * self.channel_scale * self.dim**-0.5
        logits = self.gate(x)  # [t, e]
        scores = None  # of all experts, [t, e]
        selects_by_score = self.selection_bias is None and self.top_groups == self.groups  # all groups are selected
        is_softmax_of_selected = self.score_function == "softmax" and self.normalize and not self.sum_eps
        if is_softmax_of_selected and selects_by_score and self.balance is None:
            # A softmax over all experts, divided by its sum over the selected ones, is a softmax over these. Bias,
            # groups and a balancing loss need the scores of all experts.
            top_logits, selected_experts = logits.float().topk(self.experts_per_token, dim=-1)  # [t, k], [t, k]
            selected_scores = top_logits.softmax(-1)
        else:
            if self.score_function == "sigmoid":
                scores = logits.float().sigmoid()
            else:
                scores = logits.softmax(-1, dtype=torch.float32)
            if selects_by_score:
                selected_scores, selected_experts = scores.topk(self.experts_per_token, dim=-1)  # [t, k], [t, k]
            else:
                # Bias and groups decide which experts are selected; the scores of these stay as they are.
                ranking_scores = scores  # [t, e]
                if self.selection_bias is not None:
                    ranking_scores = ranking_scores + self.selection_bias
                if self.top_groups != self.groups:
                    ranking_scores = self._without_other_groups(ranking_scores)
                selected_experts = ranking_scores.topk(self.experts_per_token, dim=-1).indices  # [t, k]
                selected_scores = scores.gather(-1, selected_experts)  # [t, k]
            if self.normalize:
                selected_scores = _Normalize.apply(selected_scores, self.sum_eps)
        if self.scale != 1.0:
            selected_scores = selected_scores * self.scale
        if self.expert_scale is not None:
            selected_scores = selected_scores * self.expert_scale[selected_experts]
        # Not `bincount`, for which the host waits.
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_(0, selected_experts.flatten(), 1, reduce="add")
        if self.training:
            if self.tokens_per_expert is None:
                self.tokens_per_expert = torch.zeros_like(counts)
            _add_counts(counts, self.tokens_per_expert)
            # Without gradients, no backward pass follows, in which the balancing loss would get its gradient.
            if self.balance is not None and torch.is_grad_enabled():
                probabilities = scores  # [t, e]
                if self.score_function == "sigmoid":  # those of a token do not sum to 1
                    probabilities = scores / scores.sum(-1, keepdim=True)
                selected_scores = self.balance.attach(selected_scores, probabilities, counts)
        return selected_scores, selected_experts, counts

    def _without_other_groups(self, scores: Tensor) -> Tensor:
        """Return the scores ``[t, e]``, with ``-inf`` for experts outside the selected groups."""
        grouped = scores.unflatten(-1, (self.groups, -1))  # [t, groups, e / groups]
        best_two = grouped.topk(2, dim=-1).values  # [t, groups, 2]
        group_scores = best_two.sum(-1)  # [t, groups]
        top_groups = group_scores.topk(self.top_groups, dim=-1).indices  # [t, top_groups]
        is_top = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, top_groups, True)  # [t, groups]
        masked = grouped.masked_fill(~is_top[..., None], float("-inf"))
        return masked.flatten(-2)


class _Normalize(torch.autograd.Function):
    """Division by the sum of each row; its derivative has four operators, where those of sum and division have nine."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, eps: float) -> Tensor:
        total = scores.sum(-1, keepdim=True)  # [t, 1]
        if eps:
            total += eps
        normalized = scores / total
        ctx.save_for_backward(normalized, total)
        return normalized

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        normalized, total = ctx.saved_tensors
        grad_total = (grad * normalized).sum(-1, keepdim=True)
        return (grad - grad_total).div_(total), None


@torch.library.custom_op("torchtune::count_tokens", mutates_args=("total",))
def _add_counts(counts: Tensor, total: Tensor) -> None:
    """Add token counts to a total, except when activation checkpointing recomputes the layer."""
    if not in_backward_pass():
        total += counts


class _PermuteRows(torch.autograd.Function):
    """Compute ``x[order // copies]`` for a permutation ``order`` with its inverse.

    The derivative of indexing adds gradients at indices, with atomic operations. This one gathers by the inverse.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        """Gather rows: ``[t, d]`` to ``[t * copies, d]``."""
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        if copies == 1:
            return x[order]
        return x[order // copies]  # copies of a row are adjacent: copy i is of row i // copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradients of every row's copies."""
        (inverse,) = ctx.saved_tensors
        grad_x = grad[inverse]  # [t * copies, d], in the order of x
        if ctx.copies != 1:
            grad_x = grad_x.unflatten(0, (-1, ctx.copies)).sum(1)  # [t, d]
        return grad_x, None, None, None


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Repeat rows ``[t, …]`` and permute the copies to ``[t * copies, …]``.

    Args:
        x: rows ``[t, …]``.
        order: permutation of the copies, int64 ``[t * copies]``, which are adjacent for each row before it is applied.
        inverse: inverse of ``order``.
        copies: number of copies of each row.
    """
    return _PermuteRows.apply(x, order, inverse, copies)


def invert_permutation(order: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 ``[n]``, without a second sort."""
    positions = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


class MoE(nn.Module):
    """Mixture of experts: ``Σ score · expert(x)`` over the selected experts.

    Tokens are sorted by expert; experts without tokens are not computed.

    Args:
        experts: module that maps rows sorted by expert, and the number of rows per expert, to rows.
        router: module that maps tokens to scores, selected experts and tokens per expert.
        shared_expert: feed-forward layer ``[…, d] -> […, d]`` for all tokens; its output is added.
        shared_gate: projection ``d -> 1``; its sigmoid scales the output of ``shared_expert``.
        norms: norms of the inputs and outputs of ``experts`` and of ``shared_expert``, by name: ``input``, ``output``,
            ``shared_input``, ``shared_output``. The router's input is not normalized.
        scales_input: whether scores multiply the inputs of experts instead of their outputs.
        latent: projections ``d -> l`` of the experts' input and ``l -> d`` of their summed output, for experts of width
            l. The router and the shared expert have inputs of width d.

    Example:
        >>> from torchtune.modules.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
        >>> gate = torch.nn.Linear(8, 4, bias=False)
        >>> router = TokenChoiceTopKRouter(gate=gate, dim=8, num_experts=4, experts_per_token=2)
        >>> experts = GroupedExperts(dim=8, hidden_dim=16, num_experts=4)
        >>> experts.reset_parameters()
        >>> MoE(experts=experts, router=router)(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        *,
        experts: nn.Module,
        router: nn.Module,
        shared_expert: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
        norms: Mapping[str, nn.Module] | None = None,
        scales_input: bool = False,
        latent: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.scales_input = scales_input
        self.experts = experts
        self.router = router
        self.shared_expert = shared_expert
        self.shared_gate = shared_gate
        self.norms = None if norms is None else nn.ModuleDict(norms)
        self.latent_in, self.latent_out = latent or (None, None)
        self.exchange: Any = None  # torchtune.modules.parallel.ExpertParallel, if experts are sharded

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mixture to ``[b, s, d]``."""
        tokens = x.flatten(0, -2)  # [t, d], t = b * s
        scores, selected_experts, counts = self.router(tokens)  # [t, k], [t, k], [e]
        order = selected_experts.flatten().argsort(stable=True)  # [t * k], copies of tokens sorted by expert
        # Before the other experts: activation checkpointing recomputes a layer up to the last tensor that the backward
        # pass needs, and then skips the frozen experts, which save nothing but their inputs.
        shared = None
        if self.shared_expert is not None:
            shared = self._shared_output(tokens)  # [t, d]

        expert_inputs = tokens
        if self.norms is not None:
            expert_inputs = self.norms["input"](tokens)
        if self.latent_in is not None:
            expert_inputs = self.latent_in(expert_inputs)  # [t, l]
        # Frozen experts copy tokens and sum outputs themselves, unless rows go to other ranks or are scaled before.
        takes_all_rows = self.exchange is None and not self.scales_input
        if takes_all_rows and isinstance(self.experts, GroupedExperts) and self.experts.computes_frozen():
            out = self.experts(expert_inputs, counts, Selection(scores, order))  # [t, d]
        else:
            out = self._apply_to_copies(expert_inputs, scores, order, counts)  # [t, d]
        if self.latent_out is not None:
            out = self.latent_out(out)  # [t, l] -> [t, d]

        if self.norms is not None:
            out = self.norms["output"](out)
        if shared is not None:
            out = out + shared
        return out.view_as(x)

    def _apply_to_copies(self, tokens: Tensor, scores: Tensor, order: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to copies of the tokens, sorted by expert, and sum their outputs by token.

        Args:
            tokens: ``[t, d]``.
            scores: ``[t, k]``.
            order: permutation of the copies, ``[t * k]``.
            counts: copies per expert, ``[e]``.
        """
        copies = scores.shape[1]  # k, a copy for each selected expert
        inverse = invert_permutation(order)
        if self.scales_input:  # each copy has its own score, so that copies are made before they are permuted
            scaled = tokens.unsqueeze(1) * scores.unsqueeze(-1).to(tokens.dtype)  # [t, k, d]
            rows = permute_rows(scaled.flatten(0, 1), order, inverse)  # [t * k, d]
        else:
            rows = permute_rows(tokens, order, inverse, copies)  # [t * k, d]
        if self.exchange is None:
            rows = self.experts(rows, counts)
        else:
            rows = self.exchange(self.experts, rows, counts)  # the experts of other ranks, too

        rows = permute_rows(rows, inverse, order)  # [t * k, d], the copies of a token adjacent again
        by_token = rows.unflatten(0, (-1, copies))  # [t, k, d]
        if not self.scales_input:
            by_token = by_token * scores.unsqueeze(-1).to(by_token.dtype)
        return by_token.sum(1)

    def _shared_output(self, tokens: Tensor) -> Tensor:
        """Apply the shared expert to tokens ``[t, d]``."""
        if self.norms is not None:
            shared = self.norms["shared_input"](tokens)
            shared = self.shared_expert(shared)
            return self.norms["shared_output"](shared)
        shared = self.shared_expert(tokens)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(tokens).sigmoid()
        return shared
