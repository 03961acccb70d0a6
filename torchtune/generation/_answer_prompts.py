"""Generate answers to many prompts, and write each to a file when it ends."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

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
from torchtune.training.parallel import Ranks, checksum_parameters, is_sharded, type_before_fsdp
from torchtune.utils import atomic_write, convert_os_errors


class AnswerFile:
    """Answers as JSON lines, in the order in which they end; an interrupted run continues after them.

    Each line has ``line`` (of the prompt), ``prompt``, ``answer``, ``end``, ``tokens`` and ``settings``, a digest of
    the model and the sampling settings.

    Args:
        path: the file; an incomplete last line is removed.
        prompts: all prompts.
        settings: settings that the answers depend on.
        ranks: the ranks that share the model: the first one reads and writes the file, and all know the answers.

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

    def __init__(
        self,
        path: str | Path,
        prompts: Sequence[Prompt],
        settings: Mapping[str, Any],
        *,
        ranks: Ranks | None = None,
    ) -> None:
        self.path = Path(path)
        settings_text = json.dumps(settings, sort_keys=True, default=str)
        self._digest = hashlib.sha256(settings_text.encode()).hexdigest()[:12]
        self.done: dict[int, dict[str, Any]] = {}
        self._file: BinaryIO | None = None
        if ranks is None:
            self._open(prompts)
            return
        with ranks.raise_on_all():
            if ranks.rank == 0:
                self._open(prompts)
        self.done = ranks.broadcast(self.done)

    def _open(self, prompts: Sequence[Prompt]) -> None:
        """Read the answers of earlier runs, and open the file for more."""
        prompts_by_line = {prompt.line: prompt.given for prompt in prompts}
        content = b""
        with convert_os_errors(self.path):
            if self.path.exists():
                content = self.path.read_bytes()
        # A process that was killed may have left half a line.
        complete_lines = content[: content.rfind(b"\n") + 1]
        for number, text in enumerate(complete_lines.splitlines(), start=1):
            self._read_answer(number, text, prompts_by_line)
        with convert_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._file.truncate(len(complete_lines))

    def _read_answer(self, number: int, text: bytes, prompts_by_line: Mapping[int, Any]) -> None:
        """Add a line of the file to ``done``. Raises :class:`GenerationError` if it answers something else."""
        location = f"output: {self.path}, line {number}"
        advice = "name another file, or delete it to begin anew."
        try:
            row = json.loads(text)
            line = row["line"]
            prompt = row["prompt"]
            settings = row["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise GenerationError(f"{location}: it is not an answer of this recipe: {advice}") from error
        if line not in prompts_by_line or prompts_by_line[line] != prompt:
            raise GenerationError(f"{location}: it answers a prompt that is not in the file of prompts: {advice}")
        if settings != self._digest:
            raise GenerationError(f"{location}: it is the answer of another model or of other settings: {advice}")
        self.done[line] = row

    def add(self, prompt: Prompt, answer: str, end: str, tokens: int) -> None:
        """Append an answer; ``end`` is stop, max_new_tokens or context."""
        row = {"line": prompt.line, "prompt": prompt.given, "answer": answer, "end": end, "tokens": tokens}
        self.done[prompt.line] = {**row, "settings": self._digest}
        if self._file is None:
            return
        with convert_os_errors(self.path):
            self._file.write(_json_line(self.done[prompt.line]))
            self._file.flush()

    def finish(self, notes: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Sort the answers by the lines of their prompts, and add the notes of each line."""
        for line, note in (notes or {}).items():
            self.done[line] |= note
        if self._file is None:
            return
        self.close()
        with atomic_write(self.path) as file:
            file.writelines(_json_line(self.done[line]) for line in sorted(self.done))

    def close(self) -> None:
        """Close the file, with the answers so far."""
        if self._file is None:
            return
        with convert_os_errors(self.path):
            if not self._file.closed:
                os.fsync(self._file.fileno())
            self._file.close()


def _json_line(row: Mapping[str, Any]) -> bytes:
    """Return a line of the file; lone surrogates of an answer become question marks."""
    text = json.dumps(row, ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"


# Prompts per continuous batch, for each of its sequences.
_PROMPTS_PER_SEQUENCE = 64


@torch.no_grad()
def model_digest(model: nn.Module, tokenizer: Any) -> str:
    """Return a digest of the weights (every bit, adapters included), the layers, and the tokenizer.

    All ranks of a sharded model call it, and get the digest that one device would give.

    Args:
        model: the model with its weights.
        tokenizer: the tokenizer of its prompts.

    Example:
        >>> before = torchtune.generation.model_digest(model, tokenizer)
        >>> torch.nn.init.zeros_(model.norm.scale).requires_grad
        True
        >>> before == torchtune.generation.model_digest(model, tokenizer)
        False
    """
    description = getattr(model, "description", None)  # a user's model may lack it
    layers = [type_before_fsdp(module).__qualname__ for module in model.modules()]
    digest = hashlib.sha256(repr((description, layers)).encode())
    checksums_by_name = checksum_parameters(model)
    for name, parameter in model.named_parameters():
        facts = (name, str(parameter.dtype), list(parameter.shape), checksums_by_name[name])
        digest.update(repr(facts).encode())
    transform = getattr(tokenizer, "transform_image", None)  # only tokenizers of images have it
    image_settings = None
    if transform is not None:
        image_settings = vars(transform)
    fingerprint = Fingerprint({"tokenizer": tokenizer, "images": image_settings})
    digest.update(fingerprint.text.encode())
    return digest.hexdigest()


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

    All ranks of a sharded model call it together; the first one reads and writes the file and shows the progress.

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
    tokens_by_line: dict[int, list[int]] = {}
    limits: dict[int, int] = {}
    pixel_digests: dict[int, str] = {}
    for prompt in prompts:
        row = tokenize_prompt(model, tokenizer, prompt, source)
        tokens_by_line[prompt.line] = row["tokens"]
        limits[prompt.line] = answer_limit(model, row["tokens"], max_new_tokens, f"{source}, line {prompt.line}")
        if prompt.has_images:  # read again to answer the prompt: all images together may not fit in memory
            pixel_digests[prompt.line] = _pixel_digest(row["encoder_input"]["images"])

    settings = {
        **settings,
        "model": digest or model_digest(model, tokenizer),
        "sampling": [max_new_tokens, temperature, top_k, seed],
    }
    # Only if there are any: the digest of other settings stays as it was, so that earlier files are continued.
    if pixel_digests:
        settings["images"] = pixel_digests
    if top_p is not None or min_p is not None:
        settings["truncation"] = [top_p, min_p]
    if logits_processors:
        settings["processors"] = Fingerprint({"logits_processors": list(logits_processors)}).text
    ranks = None
    if is_sharded(model):
        ranks = Ranks(GenerationError)
    answers = AnswerFile(output, prompts, settings, ranks=ranks)
    if seed is None:  # after the digest, which has None: a continued run draws another seed
        seed = torch.seed()
        if ranks is not None:
            seed = ranks.broadcast(seed)

    waiting = [prompt for prompt in prompts if prompt.line not in answers.done]
    device = model.tok_embeddings.weight.device
    is_hidden = None  # None: tqdm shows the bar on a terminal alone
    if ranks is not None and ranks.rank > 0:
        is_hidden = True
    bar = tqdm(total=len(prompts), initial=len(answers.done), unit="prompt", disable=is_hidden)
    # Weights are packed once for all groups, instead of once for each call of stream_answers.
    with closing(answers), bar, fast_linears(model, pack=bool(waiting)):
        for group in _groups(waiting, max_sequences):
            draws = None
            if temperature != 0:
                keys = [(seed, prompt.line) for prompt in group]
                draws = seeded_draws(keys, max_new_tokens, device, np.float32)
            ended = stream_answers(
                model,
                tokenizer,
                group,
                [tokens_by_line[prompt.line] for prompt in group],
                [limits[prompt.line] for prompt in group],
                max_new_tokens=max_new_tokens,
                images=_read_images(model, tokenizer, group, source, device),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                logits_processors=logits_processors,
                draws=draws,
                max_sequences=max_sequences,
            )
            with closing(ended):  # an error of on_answer must restore the model, too
                for prompt, text, end, num_tokens in ended:
                    answers.add(prompt, text, end, num_tokens)
                    bar.update()
                    if on_answer is not None:
                        on_answer(prompt, text)
    return answers


def stream_answers(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    prompt_tokens: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    max_new_tokens: int,
    images: Sequence[Mapping[str, Any]],
    **sampling: Any,
) -> Iterator[tuple[Prompt, str, str, int]]:
    """Answer prompts in a continuous batch, and yield each answer when it ends.

    Args:
        model: the decoder, or the model of text and images.
        tokenizer: the model's tokenizer.
        prompts: prompts to answer.
        prompt_tokens: tokens of each prompt.
        limits: maximum number of new tokens of each answer, see :func:`torchtune.generation.answer_limit`.
        max_new_tokens: the limit that is not due to the model's context.
        images: images of each prompt, as returned by :func:`torchtune.generation.images_of_row`.
        **sampling: see :func:`stream_tokens`.

    Yields:
        The prompt, the text of its answer, the reason for its end (stop, max_new_tokens or context), and its number of
        tokens.
    """
    device = text_decoder(model).tok_embeddings.weight.device
    stop = frozenset(map(int, tokenizer.stop_tokens))
    steps = stream_tokens(
        model,
        [torch.tensor(tokens, device=device) for tokens in prompt_tokens],
        max_new_tokens=limits,
        stop_tokens=list(stop),
        images=images,
        **sampling,
    )
    with closing(steps):
        for index, tokens in _ended_sequences(steps, limits, stop):
            prompt = prompts[index]
            answer_tokens = tokens
            if tokens[-1] in stop:
                end = "stop"
                answer_tokens = tokens[:-1]  # the stop token is no text
            elif len(tokens) == max_new_tokens:
                end = "max_new_tokens"
            else:  # the limit of this prompt is lower, because the context is full
                end = "context"
            options = {}
            if prompt.expects_call:  # the marks of a call are special tokens in some formats
                options = {"skip_special_tokens": False}
            yield prompt, tokenizer.decode(answer_tokens, **options), end, len(tokens)


def _groups(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    """Yield groups of prompts to answer in one batch; groups with images are small, as all their images are loaded."""
    for has_images, count in ((False, _PROMPTS_PER_SEQUENCE * size), (True, size)):
        prompts_of_kind = [prompt for prompt in prompts if prompt.has_images == has_images]
        for start in range(0, len(prompts_of_kind), count):
            yield prompts_of_kind[start : start + count]


def tokenize_prompt(model: nn.Module, tokenizer: Any, prompt: Prompt, source: str | Path) -> dict[str, Any]:
    """Tokenize a prompt of a file.

    Raises:
        GenerationError: see :func:`prompt_row`; or an image cannot be read, or the model reads no images.
    """
    location = f"{source}, line {prompt.line}"
    reads_text_only = text_decoder(model) is model or not getattr(tokenizer, "takes_images", False)
    if prompt.has_images and reads_text_only:
        raise GenerationError(
            f"{location}: it has an image, but a {type(model).__name__} with a {type(tokenizer).__name__} reads text "
            "only: use model and tokenizer of a vision model, or remove the image."
        )
    try:
        return prompt_row(tokenizer, prompt.messages, location, prompt.tools)
    except DataError as error:
        raise GenerationError(f"{location}: {str(error).rstrip('.')}: correct the line.") from error


def _read_images(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Prompt], source: str | Path, device: torch.device
) -> list[dict[str, Any]]:
    """Read the images of prompts to a device, each as of :func:`images_of_row`; empty for a prompt without images."""
    images: list[dict[str, Any]] = []
    for prompt in prompts:
        prompt_images = {}
        if prompt.has_images:
            row = tokenize_prompt(model, tokenizer, prompt, source)
            prompt_images = images_of_row(row, device)
        images.append(prompt_images)
    return images


def _pixel_digest(images: Sequence[Tensor] | Images) -> str:
    """Return a digest of the pixels of a prompt's images, and of their shapes."""
    if isinstance(images, Images):
        images = [images.pixels]
    digest = hashlib.sha256()
    for image in images:
        digest.update(repr(list(image.shape)).encode())
        digest.update(image.contiguous().view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


def _ended_sequences(
    steps: Iterator[TokenStep], limits: Sequence[int], stop: frozenset[int]
) -> Iterator[tuple[int, list[int]]]:
    """Yield (index, tokens) of each sequence when it ends, by a stop token or at its limit."""
    sequences: list[list[int]] = [[] for _ in limits]
    for step in steps:
        rows = step.rows.tolist()
        tokens = step.tokens.tolist()
        for index, token in zip(rows, tokens, strict=True):
            sequences[index].append(token)
            if token in stop or len(sequences[index]) == limits[index]:
                yield index, sequences[index]
