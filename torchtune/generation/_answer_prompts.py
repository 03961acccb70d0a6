"""Generate answers to many prompts, and write each to a file when it ends."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchtune.data import DataError, Images, Message, tools_entry
from torchtune.datasets import Fingerprint
from torchtune.generation._fast_linear import fast_linears
from torchtune.generation._generate import TokenStep, seeded_draws, stream_tokens
from torchtune.generation._generation_error import GenerationError
from torchtune.generation._prompt_images import images_of_row
from torchtune.generation._prompts import AnswerFile, Prompt
from torchtune.generation._sampling import LogitsProcessor
from torchtune.modules.transformer import TransformerDecoder, text_decoder
from torchtune.training import checksum_bits

# Prompts per continuous batch, for each of its sequences.
_PROMPTS_PER_SEQUENCE = 64


@torch.no_grad()
def model_digest(model: nn.Module, tokenizer: Any) -> str:
    """Return a digest of the weights (every bit, adapters included), the layers, and the tokenizer.

    Args:
        model: the model with its weights, on one device.
        tokenizer: the tokenizer of its prompts.

    Example:
        >>> before = torchtune.generation.model_digest(model, tokenizer)
        >>> torch.nn.init.zeros_(model.norm.scale).requires_grad
        True
        >>> before == torchtune.generation.model_digest(model, tokenizer)
        False
    """
    layers = [type(module).__qualname__ for module in model.modules()]
    found = hashlib.sha256(repr((getattr(model, "description", None), layers)).encode())
    for name, parameter in model.named_parameters():
        sums = [int(one) for one in checksum_bits(parameter)]
        found.update(repr((name, str(parameter.dtype), list(parameter.shape), sums)).encode())
    transform = getattr(tokenizer, "transform_image", None)
    of_tokenizer = Fingerprint({"tokenizer": tokenizer, "images": None if transform is None else vars(transform)})
    found.update(of_tokenizer.text.encode())
    return found.hexdigest()


@torch.inference_mode()
def answer_prompts(
    model: TransformerDecoder,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    output: str | Path,
    settings: Mapping[str, Any],
    *,
    source: str | Path,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = 0,
    max_sequences: int = 16,
    digest: str | None = None,
    on_answer: Callable[[Prompt, str], None] | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> AnswerFile:
    """Answer every prompt that has no answer in a file yet, in a continuous batch.

    Args:
        model: the decoder, or the model of text and images, with its weights.
        tokenizer: the model's tokenizer.
        prompts: prompts to answer.
        output: file of answers, see :class:`AnswerFile`.
        settings: further settings that the answers depend on; their digest is written with each answer.
        source: name of the prompts' file, for messages.
        max_new_tokens: maximum number of tokens per answer.
        temperature: see :func:`stream_tokens`.
        top_k: see :func:`stream_tokens`.
        seed: random seed; with it, an answer depends only on the line of its prompt. None draws a seed.
        max_sequences: number of sequences in the batch.
        digest: :func:`model_digest` of model and tokenizer, if known already.
        on_answer: called with each prompt and its answer, after the answer is written to the file.
        top_p: see :func:`stream_tokens`.
        min_p: see :func:`stream_tokens`.
        logits_processors: see :func:`stream_tokens`.

    Returns:
        The file with all answers; call :meth:`AnswerFile.finish` to sort it.

    Raises:
        GenerationError: a prompt leaves no room for an answer, an image cannot be read, the file has other answers, or
            the logits are not finite.

    Example:
        >>> _ = (folder / "prompts.jsonl").write_text('"the cat"')
        >>> prompts = torchtune.generation.read_prompts(folder / "prompts.jsonl")
        >>> answers = torchtune.generation.answer_prompts(
        ...     model, tokenizer, prompts, folder / "answers.jsonl", {}, source="prompts.jsonl", max_new_tokens=4
        ... )
        >>> answers.finish()
        >>> list(answers.done)
        [1]
    """
    given, pixels = {}, {}
    for prompt in prompts:
        row = _row(model, tokenizer, prompt, source)
        given[prompt.line] = row["tokens"]
        if prompt.has_images:  # read again to answer the prompt: all images together may not fit in memory
            pixels[prompt.line] = _pixel_digest(row["encoder_input"]["images"])
    limits = {
        line: answer_limit(model, tokens, max_new_tokens, f"{source}, line {line}") for line, tokens in given.items()
    }
    settings = {
        **settings,
        "model": digest or model_digest(model, tokenizer),
        "sampling": [max_new_tokens, temperature, top_k, seed],
        **({"images": pixels} if pixels else {}),
    }
    if top_p is not None or min_p is not None:
        settings["truncation"] = [top_p, min_p]
    if logits_processors:
        settings["processors"] = Fingerprint({"logits_processors": list(logits_processors)}).text
    answers = AnswerFile(output, prompts, settings)
    seed = torch.seed() if seed is None else seed
    waiting = [prompt for prompt in prompts if prompt.line not in answers.done]
    device, stop = model.tok_embeddings.weight.device, frozenset(map(int, tokenizer.stop_tokens))
    bar = tqdm(total=len(prompts), initial=len(answers.done), unit="prompt", disable=None)
    with closing(answers), bar, fast_linears(model, pack=bool(waiting)):
        for part in _parts(waiting, max_sequences):
            images = [
                images_of_row(_row(model, tokenizer, prompt, source), device) if prompt.has_images else {}
                for prompt in part
            ]
            keys = [(seed, prompt.line) for prompt in part]
            steps = stream_tokens(
                model,
                [torch.tensor(given[prompt.line], device=device) for prompt in part],
                max_new_tokens=[limits[prompt.line] for prompt in part],
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                logits_processors=logits_processors,
                stop_tokens=list(stop),
                draws=None if temperature == 0 else seeded_draws(keys, max_new_tokens, device, np.float32),
                max_sequences=max_sequences,
                images=images,
            )
            with closing(steps):
                for row, tokens in _ended(steps, [limits[prompt.line] for prompt in part], stop):
                    prompt, stopped = part[row], tokens[-1] in stop
                    end = "stop" if stopped else "max_new_tokens" if len(tokens) == max_new_tokens else "context"
                    written = tokens[:-1] if stopped else tokens
                    # The marks of a call are special tokens in some formats.
                    options = {"skip_special_tokens": False} if prompt.expects_call else {}
                    text = tokenizer.decode(written, **options)
                    answers.add(prompt, text, end, len(tokens))
                    bar.update()
                    if on_answer is not None:
                        on_answer(prompt, text)
    return answers


def _parts(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    """Yield groups of prompts to answer in one batch; groups with images are small, as all their images are loaded."""
    for has_images, count in ((False, _PROMPTS_PER_SEQUENCE * size), (True, size)):
        some = [prompt for prompt in prompts if prompt.has_images == has_images]
        for start in range(0, len(some), count):
            yield some[start : start + count]


def _row(model: nn.Module, tokenizer: Any, prompt: Prompt, source: str | Path) -> dict[str, Any]:
    """Tokenize a prompt of a file.

    Raises:
        GenerationError: see :func:`prompt_row`; or an image cannot be read, or the model reads no images.
    """
    where = f"{source}, line {prompt.line}"
    reads_text_only = text_decoder(model) is model or not getattr(tokenizer, "takes_images", False)
    if prompt.has_images and reads_text_only:
        raise GenerationError(
            f"{where}: it has an image, but a {type(model).__name__} with a {type(tokenizer).__name__} reads text "
            "only: use model and tokenizer of a vision model, or remove the image."
        )
    try:
        return prompt_row(tokenizer, prompt.messages, where, prompt.tools)
    except DataError as error:
        raise GenerationError(f"{where}: {str(error).rstrip('.')}: correct the line.") from error


def _pixel_digest(images: Sequence[Tensor] | Images) -> str:
    found = hashlib.sha256()
    for image in [images.pixels] if isinstance(images, Images) else images:
        found.update(repr(list(image.shape)).encode() + image.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _ended(steps: Iterator[TokenStep], limits: Sequence[int], stop: frozenset[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (index, tokens) of each sequence when it ends, by a stop token or at its limit."""
    found: list[list[int]] = [[] for _ in limits]
    for step in steps:
        for row, token in zip(step.rows.tolist(), step.tokens.tolist(), strict=True):
            found[row].append(token)
            if token in stop or len(found[row]) == limits[row]:
                yield row, found[row]


def prompt_row(
    tokenizer: Any, messages: Sequence[Message], where: str, tools: list[Any] | None = None
) -> dict[str, Any]:
    """Tokenize a conversation up to the beginning of the answer: ``tokens``, and images if there are any.

    Raises:
        GenerationError: the tokenizer may have truncated the conversation; the message begins with ``where``.

    Example:
        >>> question = [torchtune.data.Message(role="user", content="Why?")]
        >>> sorted(torchtune.generation.prompt_row(tokenizer, question, where="prompt"))
        ['mask', 'tokens']
    """
    given = [*messages, Message(role="assistant", content="")]
    row = dict(tokenizer({"messages": given} | tools_entry(tools), inference=True))
    row["tokens"] = tokens = list(row["tokens"])
    longest = getattr(tokenizer, "max_seq_len", None)
    if longest is not None and len(tokens) >= longest:
        raise GenerationError(
            f"{where}: tokenizer.max_seq_len = {longest} truncates it: set max_seq_len to null, or shorten the prompt."
        )
    return row


def answer_limit(model: TransformerDecoder, tokens: Sequence[int], max_new_tokens: int, where: str) -> int:
    """Return the maximum number of new tokens after ``tokens``, within the model's context.

    Raises:
        GenerationError: there is no room for a token; the message begins with ``where``.

    Example:
        >>> torchtune.generation.answer_limit(model, [1, 2, 3], max_new_tokens=8, where="prompt")
        8
    """
    room = model.max_seq_len - len(tokens)
    if room < 1:
        raise GenerationError(
            f"{where}: its {len(tokens)} tokens leave no room for an answer in the model's context of "
            f"{model.max_seq_len}: shorten it."
        )
    return min(max_new_tokens, room)
