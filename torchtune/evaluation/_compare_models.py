"""Compare two models: their logits for the same prompts, and the outputs of each of their layers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtune.checkpoints import ModelWeights
from torchtune.evaluation._eval_rows import EvaluationError
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import get_conversions
from torchtune.modules.kernels.grouped import RowGroups
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
    maxima = []
    scores = []
    total_difference = torch.zeros((), dtype=torch.float64)
    total_variance = torch.zeros((), dtype=torch.float64)
    total_kl = torch.zeros((), dtype=torch.float64)
    num_logits = 0
    tokens = 0
    equal_tokens = 0
    for first_logits, second_logits in zip(first, second, strict=True):
        if first_logits.shape != second_logits.shape:
            raise EvaluationError(
                f"the logits of a prompt are {list(first_logits.shape)} and {list(second_logits.shape)}: compare alike."
            )
        p = first_logits.double().cpu()  # [s, v]
        q = second_logits.double().cpu()
        difference = (p - q).abs()
        maxima.append(difference.max())
        total_difference += difference.sum()
        total_variance += p.var(-1, correction=0).sum()
        log_p = p.log_softmax(-1)
        log_q = q.log_softmax(-1)
        total_kl += (log_p.exp() * (log_p - log_q)).sum()
        num_logits += p.numel()
        tokens += len(p)
        has_equal_argmax = p.argmax(-1) == q.argmax(-1)  # [s]
        equal_tokens += int(has_equal_argmax.sum())
        if p.shape[-1] == 1:  # a reward model: a single number differs from others only in other prompts
            scores.append(p.flatten())
    variance = total_variance / tokens
    if scores:
        variance = torch.cat(scores).var(correction=0)
    return Comparison(
        max_difference=float(torch.stack(maxima).max()),
        mean_difference=float(total_difference / num_logits),
        spread=float(variance.sqrt()),
        kl=float(total_kl / tokens),
        equal_tokens=equal_tokens,
        tokens=tokens,
    )


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
    description = getattr(model, "description", None)  # a user's model may lack it
    is_classifier = description is not None and description.is_classifier
    logits = []
    for ids in prompts:
        prompt_logits = model(ids[None].to(device), output="logits")[0]  # [s, v]
        if is_classifier:
            prompt_logits = prompt_logits[-1:]
        logits.append(prompt_logits.float().cpu())
    return logits


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
    weights = ModelWeights(second)
    spec, description = weights.spec_and_description
    external_names: dict[str, tuple[str, ...]] = {}
    for group in spec.weight_map("hf").groups(description):
        for name in group.tune:
            external_names[name] = group.external
    errors: dict[str, float] = {}
    for number, name in enumerate(sorted(weights.base), 1):  # adapters count with the base weight that they change
        if on_weight is not None:
            on_weight(number, len(weights.base))
        first_output = _probe_output(first, name)  # [parts, n]
        difference = (first_output - _probe_output(second, name)).norm(dim=-1)
        # Equal outputs have no error, also where both are 0. A difference that is NaN stays NaN, and then infinite.
        relative = torch.where(difference > 0, difference / first_output.norm(dim=-1), difference)
        part_errors = relative.nan_to_num(torch.inf).tolist()
        names = external_names.get(name, (name,))
        # The other layout may divide weights in another way, such as one weight for all experts of a layer: the largest
        # error then stands under the first name.
        if len(names) != len(part_errors):
            names = names[:1] * len(part_errors)
        for external_name, error in zip(names, part_errors, strict=True):
            errors[external_name] = max(error, errors.get(external_name, 0.0))
    return errors


def _probe_output(model: nn.Module, name: str) -> Tensor:
    """Return the output of a layer for a random input, or a parameter: float32 ``[parts, n]``.

    Outputs are equal for a layer with an adapter and one with merged weights. Each expert is a part; others have one.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    parameter = model.get_parameter(name)
    generator = torch.Generator().manual_seed(0)  # the same input for both models
    if isinstance(module, nn.Linear | LoRALinear) and leaf == "weight":
        x = torch.randn(_PROBES, parameter.shape[1], generator=generator)
        y = module(x.to(parameter.device, parameter.dtype))  # with the adapter, if there is one
        return y.float().view(1, -1)
    if isinstance(module, GroupedExperts):
        shapes = module.matrix_shapes()
        if leaf in shapes:
            experts, inputs, _ = shapes[leaf]
            x = torch.randn(experts * _PROBES, inputs, generator=generator)
            groups = RowGroups.of(torch.full((experts,), _PROBES, device=parameter.device))
            y = module.project(leaf, x.to(parameter.device, parameter.dtype), groups)
            return y.float().view(experts, -1)
    value = parameter.detach()
    for conversion in get_conversions(model):  # for example, trained rows of an embedding
        value = conversion.merged(name, value, model)
    return value.float().view(1, -1)
