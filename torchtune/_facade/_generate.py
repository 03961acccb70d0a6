"""Text generation with a loaded model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtune import training
from torchtune._facade._origin import ORIGINS, unwrap
from torchtune.data import Message, MessageLike, as_messages
from torchtune.generation import (
    GenerationError,
    LogitsProcessor,
    answer_limit,
    check_generates,
    generate_tokens,
    images_of_row,
    prompt_row,
    to_be_answered,
)
from torchtune.modules import TransformerDecoder, text_decoder
from torchtune.tokenizers import check_tokenizer
from torchtune.utils import get_logger

# A text is a user turn, messages are a conversation, token ids are continued unchanged.
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
    top_p: float | None = None,
    min_p: float | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> str | list[str]:
    """Generate answers to one prompt, or to several with continuous batching.

    The model runs in evaluation mode, adapters included, and returns to its previous mode afterward. An answer ends
    at a stop token of the tokenizer, after ``max_new_tokens``, or when the context is full. A warning reports answers
    that were truncated by the context or by the default length.

    Args:
        model: from :func:`load`, or from a builder with loaded weights.
        tokenizer: the model's tokenizer.
        prompt: a text, used as a user turn; a conversation, as a list of messages that does not end with the assistant,
            with images if the model reads them; or token ids, which are continued unchanged
            (``tokenizer.encode(text, add_eos=False)``). A list of these returns a list of answers.
        max_new_tokens: maximum length of an answer in tokens; 512 by default.
        temperature: divides the logits; 0 is greedy.
        top_k: sample from the k most likely tokens.
        seed: seed of sampling; random by default.
        top_p: sample from the most likely tokens whose probabilities sum to p.
        min_p: sample from the tokens that are at least p times as likely as the most likely one.
        logits_processors: functions ``(tokens [b, s], logits [b, v]) -> logits [b, v]`` that change the logits of the
            next token, before temperature, top_k, top_p and min_p; see
            :func:`stream_tokens <torchtune.generation.stream_tokens>`.

    Returns:
        The text of each answer, without special tokens.

    Raises:
        GenerationError: the prompt fills the context, a number is out of range, the tokenizer has another vocabulary,
            the checkpoint has no chat template for a conversation, or the logits are not finite.

    Example:
        >>> model, tokenizer = torchtune.load(checkpoint, dtype="fp32", device="cpu")
        >>> answers = torchtune.generate(model, tokenizer, ["Where is the cat?", "Why?"], max_new_tokens=4)
        >>> len(answers)
        2
    """
    model = unwrap(model)
    decoder = _check_model(model, tokenizer)
    prompt = _to_lists(prompt)
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int | Mapping | Message)
    rows = [
        _tokenize_prompt(decoder, tokenizer, one, number) for number, one in enumerate([prompt] if is_one else prompt)
    ]
    asked = _DEFAULT_LENGTH if max_new_tokens is None else max_new_tokens
    device = decoder.tok_embeddings.weight.device
    rng = torch.Generator(device)
    if seed is None:
        rng.seed()
    else:
        rng.manual_seed(seed)
    limits = [answer_limit(decoder, row["tokens"], asked, f"prompt {number}") for number, row in enumerate(rows)]
    images = [images_of_row(row, device) for row in rows]
    found = generate_tokens(
        model if any(images) else decoder,
        [torch.tensor(row["tokens"], device=device) for row in rows],
        max_new_tokens=limits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logits_processors=logits_processors,
        stop_tokens=tokenizer.stop_tokens,
        rng=rng,
        max_sequences=_MAX_SEQUENCES,
        images=images,
    )
    answers, cut = [], 0
    for tokens, limit in zip(found.tokens, limits, strict=True):
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


def _to_lists(prompt: Any) -> Any:
    """Convert prompts of tensors and arrays to lists of token ids.

    Raises:
        GenerationError: the prompt has an unsupported type.
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise GenerationError(
            f"prompt: a {type(prompt).__name__} is none: give a text, a list of messages, token ids, or a list of them."
        )
    is_many = not isinstance(prompt, str) and any(hasattr(one, "tolist") for one in prompt)
    return [one.tolist() if hasattr(one, "tolist") else one for one in prompt] if is_many else prompt


def _check_model(model: nn.Module, tokenizer: Any) -> TransformerDecoder:
    """Return the text decoder; raise for a model or tokenizer that would generate garbage without an error."""
    decoder = text_decoder(model)
    if not isinstance(decoder, TransformerDecoder):
        raise GenerationError(f"model: a {type(model).__name__} does not generate: give a decoder of torchtune.models.")
    check_generates(decoder)
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


def _tokenize_prompt(decoder: TransformerDecoder, tokenizer: Any, prompt: Prompt, number: int) -> dict[str, Any]:
    """Return the token ids of a prompt, including the header of the assistant's turn, and its images."""
    if prompt and not isinstance(prompt, str) and isinstance(prompt[0], int):
        row = {"tokens": list(prompt)}
    else:
        if not getattr(tokenizer, "chat_templates", True):
            raise GenerationError(
                f"prompt {number}: the checkpoint has no chat template, so that it answers no questions: load one that "
                "is instruction-tuned, or continue a text with tokenizer.encode(text, add_eos=False) as the prompt."
            )
        messages = as_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt))
        messages = to_be_answered(messages, None, f"prompt {number}")
        if any(message.contains_media for message in messages) and not getattr(tokenizer, "takes_images", False):
            raise GenerationError(
                f"prompt {number}: it has an image, but model and tokenizer read text only: torchtune.load(folder, "
                "images=True) loads the vision tower of a checkpoint that has one."
            )
        row = prompt_row(tokenizer, messages, f"prompt {number}")
    return row
