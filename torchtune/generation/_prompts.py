"""Prompts: read from a file, tokenized as rows, with their images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.data import (
    Batch,
    DataError,
    Images,
    Message,
    images_of_columns,
    join_images,
    padded_collate_tiled_images_and_mask,
    read_conversation,
    tools_entry,
    turns_of_column,
    unfold_prompt,
    with_images,
)
from torchtune.datasets import numbered_lines, parse_json
from torchtune.generation._sampling import GenerationError
from torchtune.modules.transformer import TransformerDecoder, text_decoder
from torchtune.utils import UserError


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file: the number of its line (from 1), the parsed line, and the conversation.

    Attributes:
        tools: definitions of the tools that can be called, or ``None``.
        expects_call: whether the right answer is a tool call; its special tokens are then kept in the answer's text.

    Example:
        >>> prompt = torchtune.generation.Prompt(1, "Why?", [torchtune.data.Message(role="user", content="Why?")])
        >>> prompt.messages[0].role
        'user'
    """

    line: int
    given: Any
    messages: list[Message]
    tools: list[Any] | None = field(default=None, kw_only=True)
    expects_call: bool = field(default=False, kw_only=True)

    @property
    def has_images(self) -> bool:
        """Whether an image is in the conversation."""
        return any(message.contains_media for message in self.messages)


def read_prompts(path: str | Path, system: str | None = None) -> list[Prompt]:
    """Read a JSONL file of prompts: each line is a text, a list of messages, or an object with either.

    An object has the text or the messages under ``prompt`` or ``messages`` (there also messages as JSON text), and
    optionally images under ``image`` or ``images``: a path, or a list of paths. ``tools`` are the tools that can be
    called, and ``system`` is the system prompt. Images replace ``<image>`` in the text, or precede it; in messages,
    they replace parts ``{"type": "image"}``. Other keys are ignored. Empty lines are skipped.

    Args:
        path: the file.
        system: system prompt of conversations without one.

    Raises:
        GenerationError: the file is missing, not UTF-8 or empty, a line is not a prompt, or a conversation ends with
            a turn of the assistant.

    Example:
        >>> _ = (folder / "prompts.jsonl").write_text('"Why?"\\n{"prompt": "Who wrote Faust?"}\\n')
        >>> [prompt.messages[0].text_content for prompt in torchtune.generation.read_prompts(folder / "prompts.jsonl")]
        ['Why?', 'Who wrote Faust?']
    """
    prompts = []
    try:
        for number, line in numbered_lines(Path(path)):
            prompts.append(_parse_prompt(path, number, line, system))
    except OSError as error:
        raise GenerationError(f"prompts: {path} cannot be read ({error.strerror}): give a JSONL file.") from error
    if not prompts:
        raise GenerationError(f"prompts: {path} is empty: write one prompt per line.")
    return prompts


def _parse_prompt(path: str | Path, number: int, line: bytes, system: str | None) -> Prompt:
    """Return the prompt of a line of a file; see :func:`read_prompts`."""
    location = f"prompts: {path}, line {number}"
    try:
        value = parse_json(line)
    except UserError as error:
        raise GenerationError(f'{location}: {error}; correct the line, and write texts in quotes, "…".') from error
    # A line with a text or messages alone has no column.
    column: str | None = None
    row: Mapping[str, Any] = {}
    content = value
    if isinstance(value, Mapping):
        prompt_columns = [name for name in ("prompt", "messages") if name in value]
        if len(prompt_columns) != 1:
            raise GenerationError(f"{location}: the object needs either prompt or messages, it has {', '.join(value)}.")
        column = prompt_columns[0]
        row = unfold_prompt(value, column)  # a request of OpenAI's may be the value of prompt
        content = row[column]
    try:
        if column == "messages" and isinstance(content, str) and content.lstrip().startswith("["):
            content = turns_of_column(content, "messages")  # JSON text, as in tables
        turns = with_images(content, images_of_columns(row))
        # Also reads the columns of tools and of the system prompt.
        conversation = read_conversation(row, turns, columns=[] if column is None else [column])
    except DataError as error:
        raise GenerationError(f"{location}: {str(error).rstrip('.')}: give a text or a list of messages.") from error
    messages = prompt_turns(conversation.messages, system, location)
    return Prompt(number, value, messages, tools=conversation.tools)


def prompt_turns(messages: Sequence[Message], system: str | None, where: str) -> list[Message]:
    """Return the turns of a prompt: a conversation, with the system prompt ``system`` if it has none.

    Raises:
        GenerationError: its last turn is the assistant's; the message begins with ``where``.
    """
    if not messages or messages[-1].role == "assistant":
        raise GenerationError(f"{where}: there is no turn to answer: end with a turn of the user.")
    if system and messages[0].role != "system":
        return [Message(role="system", content=system), *messages]
    return list(messages)


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
    # The empty turn asks the tokenizer for the beginning of an answer.
    conversation = [*messages, Message(role="assistant", content="")]
    row = dict(tokenizer({"messages": conversation} | tools_entry(tools), inference=True))
    row["tokens"] = list(row["tokens"])
    max_seq_len = getattr(tokenizer, "max_seq_len", None)
    if max_seq_len is not None and len(row["tokens"]) >= max_seq_len:
        raise GenerationError(
            f"{where}: tokenizer.max_seq_len = {max_seq_len} truncates it: set max_seq_len to null, or shorten the "
            "prompt."
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


def images_of_row(row: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a model's forward for the images of a tokenized row.

    Args:
        row: result of :func:`torchtune.generation.prompt_row`; without images, the return value is empty.
        device: device of the tensors.

    Example:
        >>> torchtune.generation.images_of_row({"tokens": [1, 2]}, torch.device("cpu"))
        {}
    """
    images = row.get("encoder_input", {}).get("images")
    if not images:
        return {}
    if isinstance(images, Images):
        return {"encoder_input": {"images": images}}  # images_of_batch copies them
    batch = padded_collate_tiled_images_and_mask([dict(row)], pad_direction="left")
    return Batch.from_dict(batch).to(device).inputs


def check_images(model: nn.Module, images: Sequence[Mapping[str, Any]], num_samples: int) -> None:
    """Check that a model can continue prompts with images. Raises :class:`GenerationError`."""
    if any(images) and text_decoder(model) is model:
        raise GenerationError(f"prompt: it has an image, but a {type(model).__name__} reads text only: remove it.")
    if num_samples > 1 and any("encoder_mask" in prompt_images for prompt_images in images):
        raise GenerationError(f"num_samples is {num_samples}: a {type(model).__name__} answers an image once, set 1.")


def images_of_batch(images: Sequence[Mapping[str, Any]], lengths: Sequence[int], positions: Tensor) -> dict[str, Any]:
    """Return the arguments of a model's forward for the images of prompts that are run together.

    Args:
        images: results of :func:`images_of_row`; at most one has an ``encoder_mask``.
        lengths: lengths of the prompts, in the order of the tokens.
        positions: positions ``[b, s]`` of the tokens; positions after a prompt use the last row of its
            ``encoder_mask``.
    """
    pixels: list[Images | None] = []
    for prompt_images in images:
        if "encoder_mask" in prompt_images:  # cross-attention: the batch has no other prompt with images
            mask = prompt_images["encoder_mask"]  # [1, s, t]
            rows = positions[0].clamp(max=mask.shape[1] - 1)
            return {**prompt_images, "encoder_mask": mask[:, rows]}
        if prompt_images:
            pixels.append(prompt_images["encoder_input"]["images"])
        else:
            pixels.append(None)  # its tokens count all the same: indices of image tokens are shifted by the lengths
    batch = join_images(pixels, lengths)
    if batch is None:
        return {}
    if batch.positions is not None:  # three numbers per token: time, height and width
        batch = replace(batch, positions=batch.positions.view(3, *positions.shape))
    return {"encoder_input": {"images": batch.to(positions.device)}}
