"""Compare two models: their logits for the same prompts, and the outputs of each of their layers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtune.checkpoints import ModelWeights
from torchtune.evaluation._eval_rows import EvaluationError
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import get_conversions
from torchtune.modules.moe import GroupedExperts
from torchtune.modules.peft import LoRALinear

# Number of rows of each layer's random input.
_PROBES = 8


@dataclass(frozen=True)
class Comparison:
    """Differences between the logits of two models, over all tokens of some prompts.

    Attributes:
        max_difference: largest absolute difference of two logits.
        mean_difference: mean absolute difference.
        spread: standard deviation of the first model's logits of a token, for comparison; of its scores, if it gives
            one number.
        kl: Kullback-Leibler divergence of the second model's distribution from the first one's, in nats per token.
        equal_tokens: number of positions at which both models have the same argmax.
        tokens: number of tokens.

    Example:
        >>> same = torchtune.evaluation.Comparison(0.0, 0.0, 1.0, 0.0, equal_tokens=5, tokens=5)
        >>> same.equal_tokens == same.tokens
        True
    """

    max_difference: float
    mean_difference: float
    spread: float
    kl: float
    equal_tokens: int
    tokens: int


def compare_models(first: Iterable[Tensor], second: Iterable[Tensor]) -> Comparison:
    """Compare the logits of two models.

    If a logit is NaN, the differences and the divergence are NaN, and so is the spread if it is a logit of the first
    model; the numbers of tokens are not affected.

    Args:
        first: for each prompt, logits ``[s, v]``, for example :func:`logits_of` a model.
        second: logits of the other model for the same prompts.

    Raises:
        EvaluationError: the shapes of the logits differ.

    Example:
        >>> logits = torchtune.evaluation.logits_of(model, [torch.tensor([5, 6, 7])])
        >>> same = torchtune.evaluation.compare_models(logits, logits)
        >>> same.max_difference, same.kl, same.equal_tokens
        (0.0, 0.0, 3)
    """
    maxima, scores, totals = [], [], torch.zeros(4, dtype=torch.float64)
    equal = tokens = 0
    for one, two in zip(first, second, strict=True):
        if one.shape != two.shape:
            raise EvaluationError(f"the logits of a prompt are {list(one.shape)} and {list(two.shape)}: compare alike.")
        one, two = one.double(), two.double()
        difference, (log_p, log_q) = (one - two).abs(), (part.log_softmax(-1) for part in (one, two))
        kl = (log_p.exp() * (log_p - log_q)).sum()
        maxima.append(difference.max())
        if one.shape[-1] == 1:  # a reward model: a single number differs from others only in other prompts
            scores.append(one.flatten())
        totals += torch.stack([difference.sum(), one.var(-1, correction=0).sum(), kl, torch.tensor(one.numel())])
        equal += int((one.argmax(-1) == two.argmax(-1)).sum())
        tokens += len(one)
    mean, variance, kl = totals[0] / totals[3], totals[1] / tokens, totals[2] / tokens
    if scores:
        variance = torch.cat(scores).var(correction=0)
    return Comparison(float(torch.stack(maxima).max()), float(mean), float(variance.sqrt()), float(kl), equal, tokens)


@torch.no_grad()
def logits_of(model: TransformerDecoder, prompts: Iterable[Tensor]) -> list[Tensor]:
    """Return a model's logits for prompts, float32 ``[s, v]``, on the host; for a classifier, only the last position's.

    Args:
        model: the model.
        prompts: token ids, each int64 ``[s]``.

    Example:
        >>> torchtune.evaluation.logits_of(model, [torch.tensor([5, 6, 7])])[0].shape[0]
        3
    """
    device = next(model.parameters()).device
    last = slice(-1 if getattr(getattr(model, "description", None), "is_classifier", False) else 0, None)
    return [model(ids[None].to(device), output="logits")[0, last].float().cpu() for ids in prompts]


@torch.no_grad()
def compare_layers(
    first: nn.Module, second: nn.Module, on_weight: Callable[[int, int], None] | None = None
) -> dict[str, float]:
    """Compare the outputs of each layer of two models, including adapters.

    Linear layers and experts are compared by their outputs for a random input, so an adapter equals its merged weight;
    other parameters are compared by value.

    Args:
        first: a model of :mod:`torchtune.models`, in evaluation mode.
        second: another with the same description, with or without adapters.
        on_weight: called before each weight with its number, from 1, and the number of weights.

    Returns:
        Hugging Face name of each weight -> norm of the difference, relative to the norm of the first model's output
        or value; infinite if it is not finite.

    Example:
        >>> max(torchtune.evaluation.compare_layers(model, model).values())
        0.0
    """
    weights, errors = ModelWeights(second), {}
    spec, description = weights.identity
    external = {name: group.external for group in spec.weight_map("hf").groups(description) for name in group.tune}
    for number, name in enumerate(sorted(weights.base), 1):
        if on_weight is not None:
            on_weight(number, len(weights.base))
        one, two = _computed(first, name), _computed(second, name)
        size = (one - two).norm(dim=-1)
        parts = torch.where(size > 0, size / one.norm(dim=-1), size).nan_to_num(torch.inf).tolist()
        names = external.get(name, (name,))
        for found, error in zip(names if len(names) == len(parts) else names[:1] * len(parts), parts, strict=True):
            errors[found] = max(error, errors.get(found, 0.0))
    return errors


def _computed(model: nn.Module, name: str) -> Tensor:
    """Return the output of a layer for a random input, or a parameter: float32 ``[parts, n]``."""
    path, _, leaf = name.rpartition(".")
    module, parameter = model.get_submodule(path), model.get_parameter(name)
    generator, kind = torch.Generator().manual_seed(0), {"device": parameter.device, "dtype": parameter.dtype}
    if isinstance(module, nn.Linear | LoRALinear) and leaf == "weight":
        return module(torch.randn(_PROBES, parameter.shape[1], generator=generator).to(**kind)).float().view(1, -1)
    if isinstance(module, GroupedExperts) and leaf in (shapes := module.matrix_shapes()):
        experts, inputs, _ = shapes[leaf]
        rows = torch.randn(experts * _PROBES, inputs, generator=generator).to(**kind)
        counts = torch.full((experts,), _PROBES, device=parameter.device)
        return module.project(leaf, rows, counts).float().view(experts, -1)
    value = parameter.detach()
    for conversion in get_conversions(model):  # for example, trained rows of an embedding
        value = conversion.merged(name, value, model)
    return value.float().view(1, -1)
