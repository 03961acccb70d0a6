"""Generate answers to many prompts, and write each to a file when it ends."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchtune.data import DataError, Images
from torchtune.datasets import Fingerprint
from torchtune.generation._fast_linear import fast_linears
from torchtune.generation._generate import TokenStep, stream_tokens
from torchtune.generation._prompts import Prompt, answer_limit, images_of_row, prompt_row
from torchtune.generation._sampling import GenerationError, LogitsProcessor, seeded_draws
from torchtune.modules.transformer import TransformerDecoder, text_decoder
from torchtune.training import checksum_bits
from torchtune.utils import atomic_write, convert_os_errors


class AnswerFile:
    """Answers as JSON lines, in the order in which they end; an interrupted run continues after them.

    Each line has ``line`` (of the prompt), ``prompt``, ``answer``, ``end``, ``tokens`` and ``settings``, a digest of
    the model and the sampling settings.

    Args:
        path: the file; an incomplete last line is removed.
        prompts: all prompts.
        settings: settings that the answers depend on.

    Raises:
        GenerationError: the file has other content, or answers to other prompts or with other settings.
        UserError: the file cannot be written, also when an answer is added.

    Attributes:
        done: the file's object for each prompt, by the line of the prompt.

    Example:
        >>> prompt = torchtune.generation.Prompt(1, "Why?", [torchtune.data.Message(role="user", content="Why?")])
        >>> file = torchtune.generation.AnswerFile(folder / "answers.jsonl", [prompt], {"temperature": 0})
        >>> file.add(prompt, "Because.", "stop", tokens=2)
        >>> file.finish()
        >>> file.done[1]["answer"]
        'Because.'
    """

    def __init__(self, path: str | Path, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.done: dict[int, dict[str, Any]] = {}
        given = {prompt.line: prompt.given for prompt in prompts}
        with convert_os_errors(self.path):
            content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, text in enumerate(whole.splitlines(), start=1):
            self._check(number, text, given)
        with convert_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._file.truncate(len(whole))

    def _check(self, number: int, text: bytes, given: Mapping[int, Any]) -> None:
        where, cure = f"output: {self.path}, line {number}", "name another file, or delete it to begin anew."
        try:
            row = json.loads(text)
            line, prompt, settings = row["line"], row["prompt"], row["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise GenerationError(f"{where}: it is not an answer of this recipe: {cure}") from error
        if line not in given or given[line] != prompt:
            raise GenerationError(f"{where}: it answers a prompt that is not in the file of prompts: {cure}")
        if settings != self._digest:
            raise GenerationError(f"{where}: it is the answer of another model or of other settings: {cure}")
        self.done[line] = row

    def add(self, prompt: Prompt, answer: str, end: str, tokens: int) -> None:
        """Append an answer; ``end`` is stop, max_new_tokens or context."""
        row = {"line": prompt.line, "prompt": prompt.given, "answer": answer, "end": end, "tokens": tokens}
        self.done[prompt.line] = {**row, "settings": self._digest}
        with convert_os_errors(self.path):
            self._file.write(_json_line(self.done[prompt.line]))
            self._file.flush()

    def finish(self, notes: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Sort the answers by the lines of their prompts, and add the notes of each line."""
        self.close()
        for line, note in (notes or {}).items():
            self.done[line] |= note
        with atomic_write(self.path) as file:
            file.writelines(_json_line(self.done[line]) for line in sorted(self.done))

    def close(self) -> None:
        """Close the file, with the answers so far."""
        with convert_os_errors(self.path):
            if not self._file.closed:
                os.fsync(self._file.fileno())
            self._file.close()


def _json_line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


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
