"""Adapter of a model for lm-eval (extra ``eval``)."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError, Message, collate_documents, format_content_with_images
from torchtune.evaluation._eval_rows import EvaluationError
from torchtune.generation import (
    check_generates,
    fast_linears,
    images_of_batch,
    images_of_row,
    prompt_row,
    stream,
    stream_tokens,
)
from torchtune.modules.transformer import text_decoder
from torchtune.training.parallel import sequence_multiple
from torchtune.utils import get_logger, require

_harness = require("lm_eval.api.model", extra="eval", purpose="An evaluation by tasks")
_requests = require("lm_eval.models.utils", extra="eval", purpose="An evaluation by tasks")
_windows = require("lm_eval.utils", extra="eval", purpose="An evaluation by tasks")

# lm-eval's placeholder of an image.
_TAG = "<image>"
# Maximum number of rows of logits in memory.
_LOGITS_CHUNK = 1024
_NAN_MESSAGE = "A log-likelihood is NaN: load the model in fp32, or it diverged."
# Supported names in a task's generation_kwargs.
_GENERATION_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p")
# Number of tokens decoded to find a stop text, in addition to the tokens of the stop text.
_TOKENS_BEFORE_STOP = 8
# (key of lm-eval's cache, context, continuation)
_Tokens = tuple[Any, list[int], list[int]]


def explain_no_images(model: nn.Module, tokenizer: Any) -> str | None:
    """Return why the model cannot answer questions with images, as the end of a sentence, or ``None`` if it can."""
    if text_decoder(model) is model:
        return f"but a {type(model).__name__} reads text only: name tasks of text, or a vision model."
    if not getattr(tokenizer, "takes_images", False):
        return (
            f"but the tokenizer, a {type(tokenizer).__name__}, reads text only: take that of the vision model, as "
            "the config llama3_2_vision/11B_evaluation does."
        )
    return None


def tokenize_image_question(tokenizer: Any, text: str, media: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Tokenize a question with images, as a user turn.

    Args:
        tokenizer: tokenizer of a vision model.
        text: the question, with ``<image>`` for each image.
        media: lm-eval's media arguments: ``visual``, one image or a list (Pillow, paths or URLs).
        max_tokens: maximum number of tokens.

    Raises:
        EvaluationError: the numbers of images and placeholders differ, or the question is too long.
        DataError: an image cannot be read.
    """
    images = media.get("visual")
    if images is None:
        images = []
    elif isinstance(images, str | bytes) or not isinstance(images, Sequence):
        images = [images]
    else:
        images = list(images)
    try:
        content = format_content_with_images(text, image_tag=_TAG, images=images)
    except DataError as error:
        raise EvaluationError(
            f"tasks: {error}: doc_to_text has {_TAG} once for each image of doc_to_image, and examples "
            "(num_fewshot) have no images here."
        ) from error
    row = prompt_row(tokenizer, [Message(role="user", content=content)], "tasks")
    if len(row["tokens"]) > max_tokens:
        raise EvaluationError(
            f"tasks: a question with images has {len(row['tokens'])} tokens, of which none can be cut, and there is "
            f"room for {max_tokens}: raise max_seq_length, or lower the task's max_gen_toks."
        )
    return row


def _progress(total: int, title: str, is_disabled: bool) -> tqdm:
    """Return a progress bar, which is shown in a terminal only."""
    return tqdm(total=total, desc=title, disable=True if is_disabled else None)  # None: shown in a terminal


class HarnessModel(_harness.TemplateLM):
    """Model for ``lm_eval.simple_evaluate``, which computes log-likelihoods and generates answers.

    Sequences are padding-free and sorted by length, longest first; continuations of a context that differ only in their
    last token share a forward pass. Logits are computed only for continuations, 1,024 positions at a time. A question
    with images is evaluated as a user turn, one at a time.

    Args:
        model: a decoder, or a model of text and images, with its weights.
        tokenizer: the model's tokenizer; for questions with images, a vision model's.
        batch_size: sequences per forward pass, and answers generated at the same time.
        max_length: maximum sequence length; longer sequences are truncated on the left. By default the model's context.
        max_gen_toks: maximum length of an answer, unless the task defines it.
        enable_kv_cache: generate with KV caches.

    Raises:
        EvaluationError: ``max_length`` exceeds the model's context.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        enable_kv_cache: bool = True,
    ) -> None:
        super().__init__()
        check_generates(model)
        if max_length is not None and max_length > model.max_seq_len:
            raise EvaluationError(
                f"max_seq_length is {max_length} and the model's context {model.max_seq_len}: set it to at most that."
            )
        self.model = model
        self.decoder = text_decoder(model)
        self.torchtune_tokenizer = tokenizer
        self.no_images_reason = explain_no_images(model, tokenizer)
        self.MULTIMODAL = self.no_images_reason is None  # read by lm-eval
        self.batch_size = batch_size
        self.max_gen_toks = max_gen_toks
        self._use_cache = enable_kv_cache
        self.max_length = max_length or model.max_seq_len
        self._device = model.tok_embeddings.weight.device
        self._multiple = sequence_multiple(self.decoder)  # sequence parallelism splits positions evenly over ranks
        # Without a beginning-of-sequence token, texts begin after the end of another one, as in pretraining.
        bos = getattr(tokenizer, "bos_id", None)
        self._prefix = tokenizer.eos_id if bos is None else bos
        self._prefix_text = self.tok_decode([self._prefix], skip_special_tokens=False)  # compared in tok_encode

    @property
    def eot_token_id(self) -> int:
        """End-of-sequence token."""
        return self.torchtune_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: beginning of sequence, or end of sequence if there is none."""
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize a text, by default with the beginning-of-sequence token unless the text starts with it."""
        if add_special_tokens is None:
            # A rendered chat template begins with the token already.
            has_prefix = bool(self._prefix_text) and string.startswith(self._prefix_text)
            add_special_tokens = not has_prefix
        return list(self.torchtune_tokenizer.encode(string, add_bos=add_special_tokens, add_eos=False))

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids."""
        try:
            return self.torchtune_tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        except TypeError:  # a tokenizer that cannot decode special tokens
            return self.torchtune_tokenizer.decode(list(tokens))

    @property
    def tokenizer_name(self) -> str:
        """Name for lm-eval's cache of requests."""
        return type(self.torchtune_tokenizer).__name__

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the name of the chat template, for lm-eval's results."""
        return self.tokenizer_name if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a conversation with the checkpoint's chat template.

        Raises:
            EvaluationError: the tokenizer does not return text, or the last turn is an unfinished answer.
        """
        if self.MULTIMODAL:
            raise EvaluationError(
                "chat_template: is for text alone, set it to False: questions with images are always asked in the "
                "layout of the tokenizer."
            )
        render = getattr(self.torchtune_tokenizer, "render_template", None)
        if render is None or not add_generation_prompt:
            raise EvaluationError(
                "chat_template: true needs torchtune.tokenizers.hf_tokenizer, which reads the "
                "checkpoint's template, and a task without the beginning of an answer (gen_prefix)."
            )
        return render(chat_history, add_generation_prompt=True)

    @torch.no_grad()  # FSDP could not update buffers of inference mode outside of it
    def _loglikelihood_tokens(
        self, requests: Sequence[_Tokens], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) for each (key, context, continuation)."""
        requests_by_inputs: dict[tuple[int, ...], list[int]] = defaultdict(list)
        num_truncated = 0
        for index, (_key, context, continuation) in enumerate(requests):
            if not continuation or len(continuation) > self.max_length:
                raise EvaluationError(
                    f"A continuation has {len(continuation)} tokens: it needs 1 to max_seq_length={self.max_length}."
                )
            tokens = [*context, *continuation]
            if len(tokens) > self.max_length + 1:
                num_truncated += 1
            # The last token is predicted and not an input.
            requests_by_inputs[tuple(tokens[-(self.max_length + 1) : -1])].append(index)
        self._warn_truncated(num_truncated, len(requests))
        # Longest first: a batch that does not fit in memory fails at once. Requests with equal inputs, whose
        # continuations differ in their last token only, are one sequence.
        order = sorted(requests_by_inputs, key=lambda inputs: -len(inputs))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)  # each is replaced below
        self.decoder.eval()
        with _progress(len(requests), "Log-likelihoods", disable_tqdm) as bar:
            for start in range(0, len(order), self.batch_size):
                batch_inputs = order[start : start + self.batch_size]
                rows = []
                for inputs in batch_inputs:
                    rows.append({"tokens": list(inputs), "labels": [CROSS_ENTROPY_IGNORE_IDX] * len(inputs)})
                batch = collate_documents(rows).pad_to_multiple(self._multiple).to(self.device)
                hidden = self.decoder(**batch.model_inputs(), output="hidden")[0]  # [t, d]
                end = 0  # of the inputs in the packed row
                for inputs in batch_inputs:
                    end += len(inputs)
                    targets = {index: requests[index][2] for index in requests_by_inputs[inputs]}
                    # Hidden states of the last inputs predict the continuations, which end at the same position.
                    longest = max(map(len, targets.values()))
                    target_hidden = hidden[end - longest : end]  # [n, d]
                    for index, values in self._score_targets(target_hidden, targets).items():
                        if math.isnan(values[0]):
                            raise EvaluationError(_NAN_MESSAGE)
                        results[index] = values
                        key = requests[index][0]
                        if key is not None:  # None: a window of a text; the cache gets the sum of its windows
                            self.cache_hook.add_partial("loglikelihood", key, values)
                    bar.update(len(targets))
        return results

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) for each (context, continuation), with or without images."""
        # Requests with images have a third argument.
        text_requests = [request for request in requests if len(request.args) <= 2]
        num_images = len(requests) - len(text_requests)
        text_results = iter(())
        if text_requests:
            text_results = iter(super().loglikelihood(text_requests, disable_tqdm=disable_tqdm))
        results = []
        with _progress(num_images, "Log-likelihoods with images", disable_tqdm) as bar:
            for request in requests:
                if len(request.args) <= 2:
                    results.append(next(text_results))
                    continue
                result = self._image_loglikelihood(*request.args)
                results.append(result)
                self.cache_hook.add_partial("loglikelihood", request.args, result)
                bar.update()
        return results

    @torch.no_grad()  # FSDP could not update buffers of inference mode outside of it
    def _image_loglikelihood(self, context: str, continuation: str, media: Any) -> tuple[float, bool]:
        """Return (log-likelihood, is greedy) of the answer to a question with images, without its leading space."""
        answer = self.tok_encode(continuation.lstrip(), add_special_tokens=False)
        if not answer:
            raise EvaluationError("tasks: an answer is empty: write what doc_to_choice or doc_to_target gives.")
        row = tokenize_image_question(self.torchtune_tokenizer, context, media, self.max_length + 1 - len(answer))
        sequence = [*row["tokens"], *answer[:-1]]  # the last token is predicted and not an input
        tokens = torch.tensor([sequence], device=self.device)  # [1, s]
        positions = torch.arange(len(sequence), device=self.device)[None]
        row_images = images_of_row(row, self.device)
        inputs = images_of_batch([row_images], [len(sequence)], positions)
        self.model.eval()
        hidden = self.model(tokens, **inputs, output="hidden")[0]  # [s, d]
        result = self._score_targets(hidden[-len(answer) :], {0: answer})[0]
        if math.isnan(result[0]):
            raise EvaluationError(_NAN_MESSAGE)
        return result

    def _warn_truncated(self, count: int, total: int) -> None:
        """Warn of sequences that lose their beginning, if there are any."""
        if count:
            get_logger().warning(
                f"{count:,} of {total:,} sequences are longer than max_seq_length={self.max_length} and lose their "
                "beginning."
            )

    def _score_targets(self, hidden: Tensor, targets: dict[int, list[int]]) -> dict[int, tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of continuations that end at the last hidden state of ``[n, d]``."""
        log_likelihoods = dict.fromkeys(targets, 0.0)
        are_greedy = dict.fromkeys(targets, True)
        for start in range(0, len(hidden), _LOGITS_CHUNK):
            logits = self.decoder.output(hidden[start : start + _LOGITS_CHUNK]).float()  # [chunk, v]
            log_probs = logits.log_softmax(-1)
            best = logits.argmax(-1).tolist()
            for index, tokens in targets.items():
                first = len(hidden) - len(tokens)  # index of the continuation's first token in the hidden states
                positions = range(max(first - start, 0), len(logits))  # of its tokens in the chunk
                if not positions:  # the continuation begins in a later chunk
                    continue
                chunk_tokens = [tokens[start + position - first] for position in positions]
                log_likelihoods[index] += float(log_probs[list(positions), chunk_tokens].sum())
                if [best[position] for position in positions] != chunk_tokens:
                    are_greedy[index] = False
        return {index: (log_likelihoods[index], are_greedy[index]) for index in targets}

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts, computed in windows of ``max_length``."""
        if any(len(request.args) > 1 for request in requests):
            raise EvaluationError("tasks: the perplexity of a text with images is not measured: leave the task out.")
        windows: list[_Tokens] = []  # disjoint: every token of a text is scored once
        counts = []  # windows of each text
        for request in requests:
            text_windows = list(
                _windows.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            )
            windows += [(None, *_windows.make_disjoint_window(window)) for window in text_windows]
            counts.append(len(text_windows))
        results = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = []
        for count in counts:
            sums.append(sum(log_likelihood for log_likelihood, _ in islice(results, count)))
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate answers, each up to the task's first stop text, a stop token, or the maximum length."""
        # Requests of equal settings share a batch, with and without images apart.
        groups: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(request.args[1]), len(request.args)].append(index)
        answers = [""] * len(requests)
        bar = _progress(len(requests), "Answers", disable_tqdm)
        with bar, fast_linears(self.decoder, pack=self._use_cache):
            for indices in groups.values():
                settings = _requests.normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks)
                arguments = [requests[index].args for index in indices]
                for position, text in self._generate_answers(arguments, settings):
                    index = indices[position]
                    answers[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update()
        return answers

    def _generate_answers(
        self, arguments: Sequence[tuple[Any, ...]], settings: dict[str, Any]
    ) -> Iterator[tuple[int, str]]:
        """Yield (index, answer) as answers end, for (prompt, settings) or (prompt, settings, images)."""
        unknown = sorted(settings.keys() - set(_GENERATION_SETTINGS))
        if unknown:
            raise EvaluationError(
                f"generation_kwargs: '{unknown[0]}' is not known here: use {', '.join(_GENERATION_SETTINGS)}."
            )
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        until = _requests.handle_stop_sequences(settings.get("until"), eos=eos or None)
        max_new_tokens = settings["max_gen_toks"]
        if max_new_tokens >= self.max_length:
            raise EvaluationError(
                f"max_gen_toks is {max_new_tokens} and max_seq_length {self.max_length}: it must be less, to leave "
                "room for the prompt."
            )
        max_prompt_tokens = self.max_length - max_new_tokens
        stop_texts = [text for text in until if text and text != eos]  # eos is among the stop tokens
        # Only the last tokens are decoded in each step; a stop text may begin within a token before its own.
        tail = _TOKENS_BEFORE_STOP
        if stop_texts:
            tail += max(len(self.tok_encode(text, add_special_tokens=False)) for text in stop_texts)
        sampling = {name: settings.get(name) for name in ("top_k", "top_p", "min_p")}
        # Greedy by default; lm-eval also sets 0 for do_sample=False.
        sampling["temperature"] = float(settings.get("temperature") or 0.0)
        sampling["stop_tokens"] = [int(token) for token in self.torchtune_tokenizer.stop_tokens]
        sampling["use_cache"] = self._use_cache

        def has_stop_text(tokens: list[int]) -> bool:
            if not stop_texts:
                return False
            ending = self.tok_decode(tokens[-tail:])
            return any(text in ending for text in stop_texts)

        if len(arguments[0]) > 2:  # generate_until groups questions with images apart
            answers = self._generate_image_answers(
                arguments, max_prompt_tokens, max_new_tokens, has_stop_text, sampling
            )
        else:
            prompts = [self.tok_encode(prompt) for prompt, _ in arguments]
            num_truncated = sum(len(tokens) > max_prompt_tokens for tokens in prompts)
            self._warn_truncated(num_truncated, len(prompts))
            prompts = [tokens[-max_prompt_tokens:] for tokens in prompts]
            answers = self._generate_text_answers(prompts, max_new_tokens, has_stop_text, sampling)
        with closing(answers):
            for index, tokens in answers:
                # A stop text may be followed by the remainder of its last token.
                yield index, _requests.postprocess_generated_text(self.tok_decode(tokens), until, None)

    def _generate_text_answers(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        has_stop_text: Callable[[list[int]], bool],
        sampling: dict[str, Any],
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (index, tokens of the answer) of tokenized prompts as answers end, in a continuous batch."""
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))  # longest first
        stop = frozenset(sampling["stop_tokens"])
        answers: list[list[int]] = [[] for _ in prompts]
        ended: list[int] = []  # in the latest step

        def is_over(sequence: int, token: int) -> bool:
            # Called with each token before its step is yielded: answers are complete when they are yielded below.
            index = order[sequence]
            answers[index].append(token)
            if token in stop or len(answers[index]) == max_new_tokens or has_stop_text(answers[index]):
                ended.append(index)
            return index in ended

        steps = stream_tokens(
            self.decoder,
            [torch.tensor(prompts[index], device=self.device) for index in order],
            max_new_tokens=max_new_tokens,
            **sampling,
            max_sequences=self.batch_size,
            is_over=is_over,
        )
        with closing(steps):
            for _ in steps:
                for index in ended:
                    yield index, answers[index]
                ended.clear()

    def _generate_image_answers(
        self,
        arguments: Sequence[tuple[Any, ...]],
        max_prompt_tokens: int,
        max_new_tokens: int,
        has_stop_text: Callable[[list[int]], bool],
        sampling: dict[str, Any],
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (index, tokens of the answer) of questions with images, one at a time."""
        for index, (text, _, media) in enumerate(arguments):
            row = tokenize_image_question(self.torchtune_tokenizer, text, media, max_prompt_tokens)
            prompt = torch.tensor(row["tokens"], device=self.device)
            images = images_of_row(row, self.device)
            answer: list[int] = []
            steps = stream(self.model, prompt, max_generated_tokens=max_new_tokens, **sampling, **images)
            with closing(steps):
                for token in steps:
                    answer.append(token)
                    if has_stop_text(answer):
                        break
            yield index, answer
