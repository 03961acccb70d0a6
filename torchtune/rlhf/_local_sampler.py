"""Sampler of answers from the trained model, in the training process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.generation import generate_tokens, images_of_row, seeded_draws
from torchtune.rlhf._rollouts import Rollout, RolloutError


class LocalSampler:
    """Sampler that uses the model in training, without a copy of its weights.

    Each prompt is prefilled once for all of its answers. Finished answers leave the batch, and waiting prompts join it.
    Tokens are sampled from the full distribution, because top-k and top-p would make the probability ratio in the loss
    wrong.

    Args:
        model: the trained model; it samples in evaluation mode.
        tokenizer: provides the default stop tokens.
        max_new_tokens: maximum number of tokens in an answer.
        temperature: divides the logits, in sampling and in the loss.
        max_sequences: maximum number of answers to sample at the same time, at least the number per prompt; limits the
            memory of the KV cache. None sets no limit.
        stop_tokens: ids of tokens that end an answer; by default the tokenizer's stop tokens.

    Raises:
        RolloutError: a number is out of range.

    Example:
        >>> sampler = torchtune.rlhf.LocalSampler(model, tokenizer, max_new_tokens=4)
        >>> len(sampler([tokenizer.encode("the cat", add_eos=False)], num_samples=2, seeds=[0]))
        2
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        max_sequences: int | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> None:
        check_sampling(max_new_tokens, temperature, max_sequences)
        self.model = model
        self.stop_tokens = check_stop_tokens(stop_tokens, tokenizer, model)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.max_sequences = max_sequences

    takes_images = True

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        seeds: Sequence[int] | None = None,
        images: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Rollout]:
        """Sample answers, see :class:`Sampler <torchtune.rlhf.Sampler>`; without seeds, decoding is greedy.

        ``images`` has the images of each prompt, see :class:`torchtune.rlhf.Prompt`.
        """
        device = self.model.tok_embeddings.weight.device
        draws = None
        temperature = 0.0
        if seeds is not None:
            # An answer depends on its seed and its number in the group alone, not on the other prompts of a batch.
            keys = []
            for seed in seeds:
                for number in range(num_samples):
                    keys.append((seed, number))
            draws = seeded_draws(keys, self.max_new_tokens, device)
            temperature = self.temperature
        row_images = None
        if images is not None:
            row_images = [images_of_row(prompt_images, device) for prompt_images in images]
        generated = generate_tokens(
            self.model,
            [torch.as_tensor(prompt, dtype=torch.int64, device=device) for prompt in prompts],
            max_new_tokens=self.max_new_tokens,
            num_samples=num_samples,
            temperature=temperature,
            stop_tokens=self.stop_tokens,
            draws=draws,
            max_sequences=self.max_sequences,
            images=row_images,
        )
        rollouts = []
        for index, (answer, log_probs) in enumerate(zip(generated.tokens, generated.log_probs, strict=True)):
            group = index // num_samples
            prompt = torch.as_tensor(prompts[group], dtype=torch.int64)
            answer = answer.cpu()
            rollout = Rollout(
                tokens=torch.cat([prompt, answer]),
                prompt_len=len(prompt),
                log_probs=log_probs.float().cpu(),
                finished=int(answer[-1]) in self.stop_tokens,
                images=images[group] if images else {},
            )
            rollouts.append(rollout)
        return rollouts


def check_sampling(max_new_tokens: int, temperature: float, max_sequences: int | None = None) -> None:
    """Check a sampler's settings. Raises :class:`RolloutError` if one is out of range."""
    if temperature <= 0:
        raise RolloutError(
            f"sampler.temperature is {temperature}: answers of a group have to differ, set it above 0 (1 is usual)."
        )
    if max_new_tokens < 1 or (max_sequences is not None and max_sequences < 1):
        raise RolloutError("sampler.max_new_tokens and sampler.max_sequences must be at least 1.")


def check_stop_tokens(stop_tokens: Sequence[int] | None, tokenizer: Any, model: nn.Module) -> list[int]:
    """Return the stop tokens, by default the tokenizer's. Raises :class:`RolloutError` for invalid ids."""
    if stop_tokens is None:
        return list(tokenizer.stop_tokens)
    vocab_size = model.tok_embeddings.weight.shape[0]
    if not stop_tokens or not all(0 <= token < vocab_size for token in stop_tokens):
        raise RolloutError(
            f"stop_tokens is {list(stop_tokens)}: give token ids below {vocab_size:,}, one at least, or null for the "
            "tokenizer's."
        )
    return list(stop_tokens)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether the model is tensor parallel."""
    meshes = [weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)]
    return any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)
