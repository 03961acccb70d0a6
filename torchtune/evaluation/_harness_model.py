"""A model as the evaluation harness (lm-eval, extra ``eval``) calls it."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchtune.data import collate_documents
from torchtune.evaluation._errors import EvaluationError
from torchtune.evaluation._harness_images import image_question, without_images
from torchtune.generation import fast_linears, stream, stream_tokens
from torchtune.generation._images import images_of_row
from torchtune.generation._tokens import finite_steps
from torchtune.modules.transformer import text_decoder
from torchtune.utils import get_logger, require

_harness = require("lm_eval.api.model", extra="eval", purpose="An evaluation by tasks")
_requests = require("lm_eval.models.utils", extra="eval", purpose="An evaluation by tasks")
_windows = require("lm_eval.utils", extra="eval", purpose="An evaluation by tasks")

# Rows of logits that exist at a time.
_LOGITS = 1024
_NAN = "A log-likelihood is NaN: load the model in fp32, or it diverged."
_GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k")
# Tokens before the newest one in which the end of an answer may have begun, in addition to those of the text itself.
_BEFORE = 8
_Tokens = tuple[Any, list[int], list[int]]


class HarnessModel(_harness.TemplateLM):
    """Log-likelihoods and answers of a decoder for ``lm_eval.simple_evaluate``.

    Sequences are evaluated without padding, the longest first; continuations of one context that differ in their last
    token share a forward pass. Logits exist for continuations alone, 1,024 positions at a time. Questions with images
    are the user's turn of a conversation, one at a time.

    Args:
        model: the decoder, or a model of text and images, with its weights.
        tokenizer: of the model; that of a vision model for questions with images.
        batch_size: sequences per forward pass, and answers that are generated at a time.
        max_length: longest sequence; longer ones lose their beginning. By default the context of the model.
        max_gen_toks: longest answer, where the task does not say.
        enable_kv_cache: generate with KV caches.

    Raises:
        EvaluationError: ``max_length`` is above the context of the model.
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
        if max_length is not None and max_length > model.max_seq_len:
            raise EvaluationError(
                f"max_seq_length is {max_length} and the model's context {model.max_seq_len}: set it to at most that."
            )
        self.model, self.decoder, self.torchtune_tokenizer = model, text_decoder(model), tokenizer
        self.MULTIMODAL = without_images(model, tokenizer) is None
        self.batch_size, self.max_gen_toks, self._use_cache = batch_size, max_gen_toks, enable_kv_cache
        self.max_length = max_length or model.max_seq_len
        self._device = model.tok_embeddings.weight.device
        bos = getattr(tokenizer, "bos_id", None)
        self._prefix = tokenizer.eos_id if bos is None else bos
        self._prefix_text = self.tok_decode([self._prefix], skip_special_tokens=False)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.torchtune_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one: the token of the beginning, or that of the end."""
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, after the token of the beginning where texts of this tokenizer begin with it."""
        begins = bool(self._prefix_text) and string.startswith(self._prefix_text)
        add_bos = not begins if add_special_tokens is None else add_special_tokens
        return list(self.torchtune_tokenizer.encode(string, add_bos=add_bos, add_eos=False))

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        try:
            return self.torchtune_tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        except TypeError:  # of a tokenizer whose special tokens have no text
            return self.torchtune_tokenizer.decode(list(tokens))

    @property
    def tokenizer_name(self) -> str:
        """For the harness's caches of requests."""
        return type(self.torchtune_tokenizer).__name__

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """What the harness writes into its results: the name of the layout."""
        return self.tokenizer_name if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation in the layout of the checkpoint.

        Raises:
            EvaluationError: the tokenizer writes no text, or an answer that has begun is to be continued.
        """
        if self.MULTIMODAL:
            raise EvaluationError(
                "chat_template: is for text alone, set it to False: questions with images are always asked in the "
                "layout of the tokenizer."
            )
        render = getattr(self.torchtune_tokenizer, "render_template", None)
        if render is None or not add_generation_prompt:
            raise EvaluationError(
                "chat_template: true needs torchtune.modules.transforms.tokenizers.hf_tokenizer, which reads the "
                "checkpoint's template, and a task without the beginning of an answer (gen_prefix)."
            )
        return render(chat_history, add_generation_prompt=True)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[_Tokens], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is what greedy decoding gives) of each (key, context, continuation)."""
        shared: dict[tuple[int, ...], list[int]] = defaultdict(list)  # inputs -> requests
        for at, (_key, context, continuation) in enumerate(requests):
            if not continuation or len(continuation) > self.max_length:
                raise EvaluationError(
                    f"A continuation has {len(continuation)} tokens: it needs 1 to max_seq_length={self.max_length}."
                )
            shared[tuple([*context, *continuation][-(self.max_length + 1) : -1])].append(at)
        self._report_cut(sum(len(one) + len(other) > self.max_length + 1 for _, one, other in requests), len(requests))
        order = sorted(shared, key=lambda inputs: -len(inputs))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        self.decoder.eval()
        bar = tqdm(total=len(requests), desc="Log-likelihoods", disable=True if disable_tqdm else None)
        with bar, fast_linears(self.decoder, pack=False):
            for start in range(0, len(order), self.batch_size):
                part = order[start : start + self.batch_size]
                batch = collate_documents([{"tokens": list(row), "labels": [-100] * len(row)} for row in part])
                hidden = self.decoder(**batch.to(self.device).model_inputs(), output="hidden")[0]
                end = 0
                for inputs in part:
                    end += len(inputs)
                    targets = {at: requests[at][2] for at in shared[inputs]}
                    longest = max(map(len, targets.values()))
                    for at, values in self._scored(hidden[end - longest : end], targets).items():
                        if math.isnan(values[0]):
                            raise EvaluationError(_NAN)
                        found[at] = values
                        if requests[at][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[at][0], values)
                bar.update(sum(len(shared[inputs]) for inputs in part))
        return found

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is what greedy decoding gives) of each (context, continuation) and its images."""
        seen = [len(request.args) > 2 for request in requests]
        texts = [request for request, has_images in zip(requests, seen, strict=True) if not has_images]
        of_texts = iter(super().loglikelihood(texts, disable_tqdm=disable_tqdm) if texts else [])
        found = []
        bar = tqdm(total=sum(seen), desc="Log-likelihoods with images", disable=True if disable_tqdm else None)
        with bar, fast_linears(self.decoder, pack=False):
            for request, has_images in zip(requests, seen, strict=True):
                if not has_images:
                    found.append(next(of_texts))
                    continue
                found.append(self._seen_loglikelihood(*request.args))
                self.cache_hook.add_partial("loglikelihood", request.args, found[-1])
                bar.update()
        return found

    @torch.inference_mode()
    def _seen_loglikelihood(self, context: str, continuation: str, given: Any) -> tuple[float, bool]:
        """The same of the answer to a question with images, whose turn begins without the space before a choice."""
        answer = self.tok_encode(continuation.lstrip(), add_special_tokens=False)
        if not answer:
            raise EvaluationError("tasks: an answer is empty: write what doc_to_choice or doc_to_target gives.")
        row = image_question(self.torchtune_tokenizer, context, given, self.max_length + 1 - len(answer))
        inputs = images_of_row(row, self.device)
        if inputs:  # the answer sees what the last token of the question sees
            mask = inputs["encoder_mask"]
            inputs["encoder_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, len(answer) - 1, -1)], dim=1)
        tokens = torch.tensor([[*row["tokens"], *answer[:-1]]], device=self.device)
        self.model.eval()
        hidden = self.model(tokens, **inputs, output="hidden")[0]
        found = self._scored(hidden[-len(answer) :], {0: answer})[0]
        if math.isnan(found[0]):
            raise EvaluationError(_NAN)
        return found

    def _report_cut(self, count: int, total: int) -> None:
        if count:
            get_logger().warning(
                f"{count:,} of {total:,} sequences are longer than max_seq_length={self.max_length} and lose their "
                "beginning."
            )

    def _scored(self, hidden: Tensor, targets: dict[int, list[int]]) -> dict[int, tuple[float, bool]]:
        """Log-likelihoods of continuations that end with the last of the hidden states ``[n, d]``."""
        sums, equal = dict.fromkeys(targets, 0.0), dict.fromkeys(targets, True)
        for start in range(0, len(hidden), _LOGITS):
            logits = self.decoder.output(hidden[start : start + _LOGITS]).float()
            log_probs, best = logits.log_softmax(-1), logits.argmax(-1).tolist()
            for at, tokens in targets.items():
                first = len(hidden) - len(tokens)  # of its continuation, among the hidden states
                places = [place for place in range(len(logits)) if start + place >= first]
                wanted = [tokens[start + place - first] for place in places]
                if places:
                    sums[at] += float(log_probs[places, wanted].sum())
                    equal[at] &= [best[place] for place in places] == wanted
        return {at: (sums[at], equal[at]) for at in targets}

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of ``max_length``."""
        windows, counts = [], []
        if any(len(request.args) > 1 for request in requests):
            raise EvaluationError("tasks: the perplexity of a text with images is not measured: leave the task out.")
        for (text,) in (request.args for request in requests):
            found = _windows.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *_windows.make_disjoint_window(window)) for window in found]
            counts.append(len(windows) - before)
        values = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = [sum(next(values)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to the first of the task's stop texts, a stop token, or its longest length."""
        groups: dict[tuple[str, int], list[int]] = defaultdict(list)
        for at, request in enumerate(requests):
            groups[repr(request.args[1]), len(request.args)].append(at)
        found = [""] * len(requests)
        bar = tqdm(total=len(requests), desc="Answers", disable=True if disable_tqdm else None)
        with bar, fast_linears(self.decoder, pack=self._use_cache):
            for members in groups.values():
                settings = _requests.normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks)
                for place, text in self._answers([requests[at].args for at in members], settings):
                    at = members[place]
                    found[at] = text
                    self.cache_hook.add_partial("generate_until", requests[at].args, text)
                    bar.update()
        return found

    def _answers(self, asked: Sequence[tuple[Any, ...]], settings: dict[str, Any]) -> Any:
        """Yield (index, answer) as answers end, to (prompt, settings) or (prompt, settings, images)."""
        if other := sorted(settings.keys() - set(_GENERATION)):
            raise EvaluationError(f"generation_kwargs: '{other[0]}' is not known here: use {', '.join(_GENERATION)}.")
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        until = _requests.handle_stop_sequences(settings.get("until"), eos=eos or None)
        longest, stop = settings["max_gen_toks"], frozenset(map(int, self.torchtune_tokenizer.stop_tokens))
        if longest >= self.max_length:
            raise EvaluationError(
                f"max_gen_toks is {longest} and max_seq_length {self.max_length}: it must be less, to leave room for "
                "the prompt."
            )
        room = self.max_length - longest
        texts = [text for text in until if text and text != eos]
        tail = _BEFORE + max((len(self.tok_encode(text, add_special_tokens=False)) for text in texts), default=0)
        sampling = {"temperature": float(settings.get("temperature") or 0.0), "top_k": settings.get("top_k")}
        sampling |= {"stop_tokens": list(stop), "use_cache": self._use_cache}

        def has_stop(tokens: list[int]) -> bool:
            last = self.tok_decode(tokens[-tail:]) if texts else ""
            return any(text in last for text in texts)

        if len(asked[0]) > 2:
            for at, (prompt, _, images) in enumerate(asked):
                row = image_question(self.torchtune_tokenizer, prompt, images, room)
                tokens = self._seen_answer(row, has_stop, {"max_generated_tokens": longest, **sampling})
                yield at, _requests.postprocess_generated_text(self.tok_decode(tokens), until, None)
            return
        given = [self.tok_encode(prompt) for prompt, _ in asked]
        self._report_cut(sum(len(tokens) > room for tokens in given), len(given))
        given = [tokens[-room:] for tokens in given]
        order = sorted(range(len(given)), key=lambda at: -len(given[at]))
        new: list[list[int]] = [[] for _ in given]
        ended: list[int] = []  # in the newest step

        def is_over(index: int, token: int) -> bool:
            tokens = new[order[index]]
            tokens.append(token)
            if token in stop or len(tokens) == longest or has_stop(tokens):
                ended.append(order[index])
            return order[index] in ended

        steps = stream_tokens(
            self.decoder,
            [torch.tensor(given[at], device=self.device) for at in order],
            max_new_tokens=longest,
            **sampling,
            max_sequences=self.batch_size,
            is_over=is_over,
        )
        with closing(finite_steps(steps, self.decoder)) as steps:
            for _ in steps:
                for at in ended:
                    yield at, _requests.postprocess_generated_text(self.tok_decode(new[at]), until, None)
                ended.clear()

    def _seen_answer(
        self, row: dict[str, Any], is_over: Callable[[list[int]], bool], sampling: dict[str, Any]
    ) -> list[int]:
        """Tokens of the answer to a question with images."""
        found: list[int] = []
        prompt = torch.tensor(row["tokens"], device=self.device)
        with closing(stream(self.model, prompt, **sampling, **images_of_row(row, self.device))) as steps:
            for token in steps:
                found.append(token)
                if is_over(found):
                    break
        return found
