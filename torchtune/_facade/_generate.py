"""Answers of a model, as text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtune import training
from torchtune._facade._origin import ORIGINS, plain
from torchtune.data import Message, MessageLike, as_messages
from torchtune.data._common import check_tokenizer
from torchtune.generation import GenerationError, generate_tokens, prompt_tokens
from torchtune.modules import TransformerDecoder, text_decoder
from torchtune.utils import get_logger

# A text is a turn of the user, messages are a conversation, token ids are continued as they are.
Prompt = str | Sequence[MessageLike] | Sequence[int]
_DEFAULT_LENGTH = 512
_MAX_SEQUENCES = 16
_SAMPLED_IDS = 64


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.6,
    top_k: int | None = None,
    seed: int | None = None,
) -> str | list[str]:
    """Answer a prompt, or several in one continuous batch.

    The model runs in evaluation mode and is left in the mode that it had, adapters included. An answer ends at a stop
    token of the tokenizer, after ``max_new_tokens``, or when the context is full; a warning says if it was cut by the
    context or by the default length.

    Args:
        model: from :func:`load` or a builder, with its weights.
        tokenizer: of the model.
        prompt: a text, which becomes a turn of the user; a conversation, a list of messages that does not end with the
            assistant; or token ids, which are continued as they are (``tokenizer.encode(text, add_eos=False)``). A
            list of these gives a list of answers.
        max_new_tokens: longest answer, in tokens; 512 by default.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens.
        seed: of sampling; by default another one at each call.

    Returns:
        The text of each answer, without special tokens.

    Raises:
        GenerationError: the prompt fills the context, a number is out of range, the tokenizer is of another vocabulary,
            there is no chat template for a conversation, or the logits are not finite.

    Example:
        >>> model, tokenizer = torchtune.load(checkpoint, dtype="fp32", device="cpu")
        >>> answers = torchtune.generate(model, tokenizer, ["Where is the cat?", "Why?"], max_new_tokens=4)
        >>> len(answers)
        2
    """
    decoder = _checked(plain(model), tokenizer)
    prompt = _listed(prompt)
    if not (math.isfinite(temperature) and temperature >= 0 and (top_k is None or top_k >= 0)):
        raise GenerationError(f"temperature is {temperature} and top_k {top_k}: both must be at least 0.")
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int | Mapping | Message)
    rows = [_tokens(decoder, tokenizer, one, number) for number, one in enumerate([prompt] if is_one else prompt)]
    asked = _DEFAULT_LENGTH if max_new_tokens is None else max_new_tokens
    device = decoder.tok_embeddings.weight.device
    rng = torch.Generator(device)
    if seed is None:
        rng.seed()
    else:
        rng.manual_seed(seed)
    limits = [min(asked, decoder.max_seq_len - len(row)) for row in rows]
    found = generate_tokens(
        decoder,
        [torch.tensor(row, device=device) for row in rows],
        max_new_tokens=limits,
        temperature=temperature,
        top_k=top_k,
        stop_tokens=tokenizer.stop_tokens,
        rng=rng,
        max_sequences=_MAX_SEQUENCES,
    )
    answers, cut = [], 0
    for number, (tokens, log_probs, limit) in enumerate(zip(found.tokens, found.log_probs, limits, strict=True)):
        if not log_probs.isfinite().all():
            raise GenerationError(
                f"prompt {number}: the model's logits are not finite in {decoder.tok_embeddings.weight.dtype}: load it "
                'with dtype="fp32", and check that its training did not diverge.'
            )
        ids = tokens.tolist()
        has_ended = ids[-1] in tokenizer.stop_tokens
        cut += not has_ended and (max_new_tokens is None or limit < asked)
        answers.append(tokenizer.decode(ids[:-1] if has_ended else ids))
    if cut:
        get_logger().warning(
            f"{cut} of {len(answers)} answers are cut, by the context of {decoder.max_seq_len} tokens or after {asked} "
            "tokens: max_new_tokens sets how long an answer may be."
        )
    return answers[0] if is_one else answers


def _listed(prompt: Any) -> Any:
    """Prompts of tensors and arrays as lists of token ids.

    Raises:
        GenerationError: it is no prompt.
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise GenerationError(
            f"prompt: a {type(prompt).__name__} is none: give a text, a list of messages, token ids, or a list of them."
        )
    is_many = not isinstance(prompt, str) and any(hasattr(one, "tolist") for one in prompt)
    return [one.tolist() if hasattr(one, "tolist") else one for one in prompt] if is_many else prompt


def _checked(model: nn.Module, tokenizer: Any) -> TransformerDecoder:
    """The text decoder, after a look at what would go wrong in silence."""
    decoder = text_decoder(model)
    if not isinstance(decoder, TransformerDecoder):
        raise GenerationError(f"model: a {type(model).__name__} does not generate: give a decoder of torchtune.models.")
    if getattr(getattr(decoder, "description", None), "is_classifier", False):
        raise GenerationError("model: it is a classifier and does not generate text: give a language model.")
    if empty := [name for name, tensor in decoder.named_parameters() if tensor.is_meta]:
        raise GenerationError(f"model: '{empty[0]}' has no values: load the weights first.")
    check_tokenizer(tokenizer)
    training.fit_vocabulary(model, tokenizer)
    own = ORIGINS[model].tokenizer if model in ORIGINS else tokenizer
    if own is not tokenizer:
        count = min(own.vocab_size, tokenizer.vocab_size)
        ids = range(count // 10, count, max(count // _SAMPLED_IDS, 1))
        differing = sum(own.decode([i]) != tokenizer.decode([i]) for i in ids)
        if differing > len(ids) // 2:
            raise GenerationError(
                "tokenizer: its tokens are not those that the model was loaded with: give the one that torchtune.load "
                "returned with it."
            )
    return decoder


def _tokens(decoder: TransformerDecoder, tokenizer: Any, prompt: Prompt, number: int) -> list[int]:
    """Token ids of a prompt, up to where the answer begins."""
    if prompt and not isinstance(prompt, str) and isinstance(prompt[0], int):
        tokens = list(prompt)
        if wrong := [i for i in tokens if not 0 <= i < decoder.tok_embeddings.weight.shape[0]]:
            raise GenerationError(f"prompt {number}: the model has no token {wrong[0]}: give ids of its tokenizer.")
    else:
        if not getattr(tokenizer, "chat_templates", True):
            raise GenerationError(
                f"prompt {number}: the checkpoint has no chat template, so that it answers no questions: load one that "
                "is instruction-tuned, or continue a text with tokenizer.encode(text, add_eos=False) as the prompt."
            )
        messages = as_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt))
        if not messages or messages[-1].role == "assistant":
            raise GenerationError(f"prompt {number}: nothing is to be answered there: end with a turn of the user.")
        tokens = prompt_tokens(tokenizer, messages, f"prompt {number}")
    if len(tokens) >= decoder.max_seq_len:
        raise GenerationError(
            f"prompt {number}: it has {len(tokens)} tokens, which leaves no room for an answer in the model's context "
            f"of {decoder.max_seq_len}: shorten it."
        )
    return tokens
