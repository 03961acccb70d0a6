"""Tokenizer for conversations, with the checkpoint's chat template.

Templates omit the reasoning of earlier turns; the policies ``keep`` and ``split`` of ``reasoning`` train on it.
"""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torchtune.data import (
    REASONING_FIELDS,
    DataError,
    Message,
    MessageLike,
    as_messages,
    read_tool_calls,
    read_tools,
    truncate_row,
)
from torchtune.tokenizers._byte_level_bpe import TokensAndMask
from torchtune.tokenizers._chat_template import ChatTemplate
from torchtune.tokenizers._files import MISSING_TOKENIZER, replace_template, template_sources
from torchtune.tokenizers._hf_tokenizer import HuggingFaceBaseTokenizer
from torchtune.tokenizers._protocols import (
    MessageTransform,
    ModelTokenizer,
    adds_end_tokens,
    messages_of,
    row_of,
)
from torchtune.tokenizers._trained_spans import (
    LayoutCache,
    Render,
    Span,
    Turn,
    TurnFinder,
    common_prefix,
    first_special,
    learn_stops,
    subtract_span,
)
from torchtune.utils import get_logger, local_path, log_once

ReasoningPolicy = Literal["strip", "keep", "split"]
_REASONING_END = "</think>"  # ends reasoning inside of a turn's text
_MARK_KEY = f"k{uuid.uuid4().hex}"  # letters and digits only, which templates leave unchanged
# Tokenizer files of other formats.
_FILES_OF_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json", "original/tokenizer.model")


class HuggingFaceModelTokenizer(MessageTransform, ModelTokenizer):
    """Tokenizes conversations with the Jinja chat template of a checkpoint.

    The whole conversation is rendered and tokenized once, so the ids equal the result of ``apply_chat_template`` in
    ``transformers``. The turns are then located in the text. Each assistant turn that is not masked is trained on, from
    the end of the generation prompt up to and including the end-of-turn token. ``{% generation %}`` blocks of the
    template are respected. If the template ends the last turn without a special token, the EOS token is appended, so
    that the model learns to stop.

    Unlike in ``transformers``, special tokens in the text of a turn, in tool calls or in tools are encoded as plain
    text, unless ``parse_special_tokens`` is set. Added tokens that are not special, such as ``<think>``, are always
    parsed.

    Args:
        tokenizer_json_path: ``tokenizer.json``.
        tokenizer_config_json_path: ``tokenizer_config.json``; by default the one in the same folder.
        generation_config_path: ``generation_config.json``; by default the one in the same folder.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        chat_template: file or text of a template that replaces the checkpoint's.
        chat_template_kwargs: further template variables, for example ``{"enable_thinking": False}``.
        parse_special_tokens: encode special tokens in the text of a turn or a document to their ids.
        reasoning: policy for reasoning in turns before the last user turn: ``"strip"`` follows the template, and most
            templates omit such reasoning; ``"keep"`` writes it as in a last turn; ``"split"`` makes
            :class:`~torchtune.datasets.SFTDataset` train every turn of such a row as a separate sample that ends with
            the turn.
        add_tokens: texts of tokens to add to the vocabulary; see :class:`HuggingFaceBaseTokenizer`.

    Raises:
        DataError: a file is missing or broken, or the template has an error.

    Example:
        >>> turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "so"}]
        >>> messages = torchtune.data.OpenAIToMessages()({"messages": turns})["messages"]
        >>> tokens, mask = tokenizer.tokenize_messages(messages)
        >>> tokenizer.decode([token for token, masked in zip(tokens, mask) if not masked], skip_special_tokens=False)
        'so<|im_end|>'
    """

    takes_tools = True

    def __init__(
        self,
        tokenizer_json_path: str,
        *,
        tokenizer_config_json_path: str | None = None,
        generation_config_path: str | None = None,
        truncation_type: str = "right",
        max_seq_len: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special_tokens: bool = False,
        reasoning: ReasoningPolicy = "strip",
        add_tokens: Sequence[str] | Mapping[str, str | None] = (),
    ) -> None:
        if reasoning not in get_args(ReasoningPolicy):
            raise DataError(f"reasoning is {reasoning!r}: use one of {', '.join(get_args(ReasoningPolicy))}.")
        self.reasoning = reasoning
        self.base_tokenizer = HuggingFaceBaseTokenizer(
            tokenizer_json_path,
            tokenizer_config_json_path=tokenizer_config_json_path,
            generation_config_path=generation_config_path,
            parse_special_tokens=parse_special_tokens,
            add_tokens=add_tokens,
        )
        self.new_tokens = self.base_tokenizer.new_tokens
        self.described_tokens = self.base_tokenizer.described_tokens
        self.max_seq_len = max_seq_len
        self.truncation_type = truncation_type
        self.special_tokens = self.base_tokenizer.special_tokens
        self._special_texts = tuple(self.special_tokens)
        self.bos_id = self.base_tokenizer.bos_id
        self.end_ids = self.base_tokenizer.end_ids
        self.eos_id = self.base_tokenizer.eos_id
        self.pad_id = self.base_tokenizer.pad_id
        self.vocab_size = self.base_tokenizer.vocab_size
        folder = local_path(tokenizer_json_path, "tokenizer.tokenizer_json_path").expanduser().parent
        self._replaces_template = chat_template is not None
        variables = {**self.base_tokenizer.named_tokens, **(chat_template_kwargs or {})}
        sources = template_sources(folder, self.base_tokenizer.config, chat_template)
        self.chat_templates = {name: ChatTemplate(source, variables) for name, source in sources.items()}
        self._control_tokens = self.base_tokenizer.control_tokens
        self._encoder = self.base_tokenizer.encoder
        self._layouts = LayoutCache(self._find_spans_without_tools)
        self._omitted = OmittedTexts()
        self._set_stops()

    def _set_stops(self) -> None:
        """Set the stop tokens: those of the checkpoint's config files and those learned from the chat template."""
        configured_ids = self.base_tokenizer.stop_tokens
        text_of_id = {token_id: text for text, token_id in self.special_tokens.items()}
        configured = [text_of_id[token_id] for token_id in configured_ids if token_id in text_of_id]
        generation_stops: list[str] = []
        stops: list[str] = []
        if "default" in self.chat_templates:
            template = self.chat_templates["default"]

            def render(turns: Sequence[Turn], add_generation_prompt: bool) -> str:
                text, _ = template.render(turns, add_generation_prompt=add_generation_prompt)
                return text

            generation_stops, stops = learn_stops(render, list(self.special_tokens), configured)
        # Generation ends at all of them; within a conversation, a turn may also end with other tokens (`stops`).
        learned_ids = [self.special_tokens[stop] for stop in generation_stops]
        self.stop_tokens = list(dict.fromkeys([*learned_ids, *configured_ids]))
        stops += [text_of_id[token_id] for token_id in self.stop_tokens if token_id in text_of_id]
        self._stops = list(dict.fromkeys(stops))
        self._turn_end_ids = {self.special_tokens[stop] for stop in self._stops}

    def save_files(self, folder: str | Path) -> None:
        """Write the tokenizer's files with the chat template in use; see :meth:`HuggingFaceBaseTokenizer.save_files`.

        A ``chat_template`` that replaces the published one is written where that was: as ``chat_template.jinja``, or
        into ``tokenizer_config.json``.
        """
        folder = Path(folder)
        self.base_tokenizer.save_files(folder)
        if self._replaces_template:
            replace_template(folder, self.chat_templates["default"].source)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; see :meth:`HuggingFaceBaseTokenizer.encode`."""
        return self.base_tokenizer.encode(text, add_bos=add_bos, add_eos=add_eos)

    def encode_text(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode a text of training data: special tokens in it are plain text, unless ``parse_special_tokens``."""
        return self.base_tokenizer.encode_text(text, add_bos=add_bos, add_eos=add_eos)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids into text."""
        return self.base_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_template(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Render a conversation with the chat template.

        Raises:
            DataError: there is no template, or it raises an error.
        """
        turns = [_as_turn(message) for message in messages]
        tools = read_tools(tools)
        return self._template(tools).render(turns, add_generation_prompt=add_generation_prompt, tools=tools)[0]

    def tokenize_messages(
        self,
        messages: Sequence[MessageLike],
        add_end_tokens: bool = True,
        *,
        add_eos: bool | None = None,
        max_seq_len: int | None = None,
        tools: Sequence[Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation.

        Args:
            messages: the conversation; of mappings that do not state ``masked``, the assistant's are trained on.
            add_end_tokens: finish the conversation, for training; False adds the generation prompt, or leaves a last
                assistant turn open.
            add_eos: deprecated name of ``add_end_tokens``.
            max_seq_len: overrides the tokenizer's ``max_seq_len``.
            tools: tool definitions for the template.

        Returns:
            token ids and mask (True = not trained on).

        Raises:
            DataError: there is no template, it raises an error, or a turn cannot be located in its text.
        """
        tokens, mask = self._tokenized(messages, adds_end_tokens(add_end_tokens, add_eos), max_seq_len, tools)
        return tokens.tolist(), list(map(bool, mask))

    def as_arrays(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``self(sample)`` with ``tokens`` as an int array and ``mask`` as bytes, for writing to a file."""
        sample = row_of(sample)
        tokens, mask = self._tokenized(messages_of(sample), True, None, sample.pop("tools", None))
        return {**sample, "tokens": tokens, "mask": mask}

    def _tokenized(
        self, messages: Sequence[MessageLike], closed: bool, max_seq_len: int | None, tools: Sequence[Any] | None
    ) -> TokensAndMask:
        """Tokenize a conversation; see :meth:`tokenize_messages`. ``closed``: end the last turn."""
        if not messages:
            raise DataError("the conversation has no turns")
        messages = as_messages(messages)
        turns = [self._turn(message) for message in messages]
        tools = self._control_tokens.hide(read_tools(tools))
        kept_reasoning = None
        if self.reasoning == "keep":
            render = partial(self._template(tools).render, tools=tools)
            kept_reasoning = KeptReasoning(lambda turns, prompt: render(turns, add_generation_prompt=prompt)[0], turns)
            turns = kept_reasoning.turns
        if closed:
            text, spans = self._finished_text(turns, [message.masked for message in messages], tools)
            for i, message in enumerate(messages):
                if not message.masked and message.has_untrained_parts:
                    spans = self._without_parts(i, messages, turns, tools, spans)
        else:
            text = self._open_text(turns, tools)
            spans = []
        if kept_reasoning is not None:
            text, spans = kept_reasoning.restore(text, spans)
        tokens, mask = self._encoder.encode_masked(text, spans)
        eos_id = None
        if closed:
            eos_id = self.eos_id
        # The model has to learn to stop, even if the template ends the last turn without a token that says so.
        is_last_trained = closed and messages[-1].role == "assistant" and not messages[-1].masked
        last_start = 0  # no span is left of a turn whose parts are all taken out
        if spans:
            last_start, _ = spans[-1]
        if is_last_trained and not text[last_start:].rstrip().endswith(self._special_texts):
            log_once(get_logger(), "The chat template does not end the last turn: the end-of-sequence token is added.")
            if eos_id is None:
                raise DataError("neither the chat template nor the tokenizer's config names a token that ends a turn")
            tokens.append(eos_id)
            mask.append(False)
        return truncate_row(
            tokens, mask, max_seq_len or self.max_seq_len, self.truncation_type, eos_id, self._turn_end_ids
        )

    def conversations(self, messages: Sequence[MessageLike]) -> list[list[Message]]:
        """Return the conversations on which a row is trained: with ``reasoning="split"`` several, otherwise one."""
        messages = as_messages(messages)
        if self.reasoning != "split":
            return [messages]
        return split_turns(messages, [self._turn(message) for message in messages])

    def changing_policies(self, messages: Sequence[MessageLike]) -> list[ReasoningPolicy]:
        """Return the policies of ``reasoning`` that would tokenize a conversation differently than this tokenizer's."""
        messages = as_messages(messages)
        if not earlier_reasoning([self._turn(message) for message in messages]):
            return []
        rows: dict[str, Any] = {}  # policy -> tokens and masks
        for policy in get_args(ReasoningPolicy):
            tokenizer = copy(self)
            tokenizer.reasoning = policy
            with suppress(DataError):  # the template cannot write the reasoning of earlier turns
                conversations = tokenizer.conversations(messages)
                rows[policy] = [tokenizer.tokenize_messages(conversation) for conversation in conversations]
        return [policy for policy, row in rows.items() if row != rows.get(self.reasoning)]

    def take_omitted(self) -> list[str]:
        """Return the kinds of texts that the chat template omitted since the last call, for example ``reasoning``.

        Reasoning before the last user turn is not among them, if the template writes it in a last turn.
        """
        return self._omitted.take()

    def _template(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """Return the template of a conversation with or without tools; raise :class:`DataError` if there is none."""
        name = "default"
        if tools is not None and "tool_use" in self.chat_templates:
            name = "tool_use"
        if name not in self.chat_templates:
            raise DataError(
                "The checkpoint has no chat template: use an instruction-tuned checkpoint, or set the tokenizer's "
                "chat_template to a template file."
            )
        return self.chat_templates[name]

    def _turn(self, message: Message) -> dict[str, Any]:
        """Convert a message to the template's dict, with placeholders for control tokens in its texts."""
        turn = _as_turn(message)
        if len(turn) == 2:  # fast path: role and text
            return {"role": turn["role"], "content": self._control_tokens.hide(turn["content"])}
        return self._control_tokens.hide(turn)

    def _open_text(self, turns: list[Turn], tools: Sequence[Any] | None) -> str:
        """Render the conversation up to the point where the model continues."""
        answer_start = ""
        if turns[-1]["role"] == "assistant":
            answer_start = turns[-1]["content"]
            turns = turns[:-1]
        template = self._template(tools)
        text, _ = template.render(turns, add_generation_prompt=True, tools=tools)
        may_omit = False
        for turn in turns:
            content = turn["content"]
            is_plain = len(turn) == 2 and isinstance(content, str)  # a role and a text
            if not is_plain or content.strip() not in text:
                may_omit = True
        # To find what the template omits takes another rendering, which most prompts do not need.
        if may_omit:
            finder = self._finder(template, text, turns, tools)
            self._omitted.add(finder.omitted(_omissible(template, turns)))
        self._omitted.add(_omitted_tools(tools, text))
        return text + answer_start

    def _finished_text(
        self, turns: list[Turn], masked: list[bool], tools: Sequence[Any] | None
    ) -> tuple[str, list[Span]]:
        """Render a finished conversation; return its text and the spans that are trained on."""
        template = self._template(tools)
        template.now = datetime.now()  # the same time in every rendering of a conversation
        try:
            text, generated = template.render(turns, tools=tools)
            spans = None
            if tools is None and not generated:  # learned layouts cover neither tools nor {% generation %} blocks
                spans = self._layouts.spans(text, turns, masked)
            if spans is None:  # layouts fit only texts that are written completely
                finder = self._finder(template, text, turns, tools)
                spans = self._find_spans(finder, generated, masked, marks_generation=template.marks_generation)
                self._omitted.add(finder.omitted(_omissible(template, turns)), _omitted_tools(tools, text))
            return text, spans
        finally:
            template.now = None

    def _without_parts(
        self,
        index: int,
        messages: Sequence[Message],
        turns: list[Turn],
        tools: Sequence[Any] | None,
        spans: list[Span],
    ) -> list[Span]:
        """Take the parts of turn ``index`` that are not trained on out of the spans of the conversation.

        Raises:
            DataError: the template does not write the turn's text once and unchanged.
        """
        # As if the other turns were masked: the spans are those of this turn.
        is_other_turn = [i != index for i in range(len(messages))]
        text, turn_spans = self._finished_text(turns, is_other_turn, tools)
        first = turn_spans[0][0]
        end = turn_spans[-1][1]
        texts = [self._control_tokens.hide(part["content"]) for part in messages[index].content]
        content = "".join(texts)
        written = content.strip()  # many templates strip the text of a turn
        if text.count(written, first, end) != 1:
            raise DataError(
                f"turn {index} has parts with train: false, but the chat template does not write its text once and "
                "unchanged, so that they cannot be located: take the whole turn out of training"
            )
        num_stripped = len(content) - len(content.lstrip())
        position = text.index(written, first, end) - num_stripped
        for part, part_text in zip(messages[index].content, texts, strict=True):
            part_end = position + len(part_text)
            if part.get("train") is False:
                spans = subtract_span(spans, (position, part_end))
            position = part_end
        return spans

    def _find_spans_without_tools(self, turns: list[Turn], masked: list[bool]) -> tuple[str, list[Span]]:
        """Return the result of :meth:`_finished_text` without tools, for :class:`LayoutCache`."""
        template = self._template(None)
        text, generated = template.render(turns)
        finder = self._finder(template, text, turns, None)
        return text, self._find_spans(finder, generated, masked, marks_generation=template.marks_generation)

    def _finder(self, template: ChatTemplate, text: str, turns: list[Turn], tools: Sequence[Any] | None) -> TurnFinder:
        return TurnFinder(
            lambda part, prompt: template.render(part, add_generation_prompt=prompt, tools=tools)[0],
            turns,
            text,
            self._stops,
            list(self.special_tokens),
        )

    def _find_spans(
        self, finder: TurnFinder, generated: Sequence[Span], masked: list[bool], *, marks_generation: bool
    ) -> list[Span]:
        """Return the spans of a rendered conversation that are trained on.

        Args:
            finder: finder of its turns.
            generated: spans of its {% generation %} blocks.
            masked: whether each turn is masked.
            marks_generation: whether the template has such blocks, one for each assistant turn.
        """
        assistant_turns = [i for i, turn in enumerate(finder.messages) if turn["role"] == "assistant"]
        generated_by_turn: dict[int, Span] = {}
        # With another number of blocks, it is not known which block is whose: the turns are looked for.
        if marks_generation and len(generated) == len(assistant_turns):
            generated_by_turn = dict(zip(assistant_turns, generated, strict=True))
        spans: list[Span] = []
        for i, turn in enumerate(finder.messages):
            if masked[i]:
                continue
            if i in generated_by_turn:
                finder.check_written(i)
                spans.append(self._with_stop(finder.text, generated_by_turn[i]))
            elif turn["role"] == "assistant":
                spans += finder.assistant(i)
            else:
                spans.append(finder.other(i))
        return sorted(spans)

    def _with_stop(self, text: str, span: Span) -> Span:
        """Extend a generation block without end-of-turn token to the end-of-turn token that follows."""
        start, end = span
        stripped_end = start + len(text[start:end].rstrip())
        if text.endswith(tuple(self._stops), start, stripped_end):
            return start, stripped_end
        following = text[end:].lstrip()
        token = first_special(following, self._stops)
        if token is None:
            return start, end
        return start, len(text) - len(following) + len(token)


class _Block(NamedTuple):
    """Reasoning of a turn, which a mark stands for in the rendered conversation.

    Attributes:
        mark: the mark.
        text: text that replaces the mark and ``num_before`` characters in front of it.
        num_before: see ``text``.
        output_start: position of the model's output, relative to the mark; None if the generation prompt differs from
            the finished turn.
    """

    mark: str
    text: str
    num_before: int
    output_start: int | None


def earlier_reasoning(turns: Sequence[Turn]) -> list[int]:
    """Return the assistant turns with reasoning before a later user turn; templates strip their reasoning."""
    last_user = 0
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            last_user = i
    indices = []
    for i, turn in enumerate(turns[:last_user]):
        if turn["role"] != "assistant":
            continue
        has_field = any(turn.get(name) for name in REASONING_FIELDS)
        if has_field or _REASONING_END in str(turn.get("content")):
            indices.append(i)
    return indices


class KeptReasoning:
    """Restores the reasoning of earlier turns in a rendered conversation, as the template writes it in a last turn.

    Args:
        render: (turns, add_generation_prompt) -> text.
        turns: the conversation as the template's input.

    Attributes:
        turns: the conversation with marks instead of reasoning.

    Raises:
        DataError: the template omits reasoning from last turns, too, or rearranges the turns.
    """

    def __init__(self, render: Render, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        self._blocks: list[_Block] = []
        for index in earlier_reasoning(turns):
            self._blocks.append(self._replace_reasoning(render, turns, index))

    def _replace_reasoning(self, render: Render, turns: Sequence[Turn], index: int) -> _Block:
        """Replace the reasoning of a turn by a mark, and return the text that the template would write for it."""
        turn = turns[index]
        mark = f"{_MARK_KEY}n{index}q"
        thoughts, end, answer = turn["content"].rpartition(_REASONING_END)
        answer = answer.lstrip("\n")
        turn_without_reasoning = {name: value for name, value in turn.items() if name not in REASONING_FIELDS}
        self.turns[index] = {**turn_without_reasoning, "content": mark + answer}

        before = self.turns[:index]
        marked_last_turn = {**turn, "content": f"{thoughts}{end}{mark}{answer}"}
        # The text before the mark, with the turn as an earlier one without reasoning, and as the last one with it.
        stripped, _, _ = render(self.turns, False).partition(mark)
        written, _, tail = render([*before, marked_last_turn], False).partition(mark)
        if written == stripped or not written.startswith(render(before, False)):
            raise DataError(
                f"reasoning=keep: the chat template writes no reasoning for turn {index} (assistant) even if it is the "
                "last one: use reasoning=strip"
            )
        replaced = mark
        if not answer:  # the mark makes the text non-empty, for which a template may write more: it goes with the mark
            tail_without_mark = render([*before, turn], False)[len(written) :]
            if tail.endswith(tail_without_mark):
                replaced += tail.removesuffix(tail_without_mark)

        # Only the text behind the first difference is replaced: it is what the reasoning changes.
        num_same = common_prefix(stripped, written)
        # Where the model's output begins, relative to the mark: the template may write a part of it for the prompt.
        prompt = render(before, True)
        output_start = None
        if written.startswith(prompt):
            output_start = len(prompt) - len(stripped)
        return _Block(replaced, written[num_same:], len(stripped) - num_same, output_start)

    def restore(self, text: str, spans: Sequence[Span] = ()) -> tuple[str, list[Span]]:
        """Replace the marks in a rendered text, and adjust the spans; each span begins where the prompt ends."""
        spans = list(spans)
        # From the last mark to the first, so that a longer text does not move the marks that are still to come.
        for block in reversed(self._blocks):
            mark_start = text.index(block.mark)
            start = mark_start - block.num_before
            end = mark_start + len(block.mark)
            text = text[:start] + block.text + text[end:]
            num_added = len(block.text) - (end - start)
            output_start = start
            if block.output_start is not None:
                output_start = mark_start + block.output_start
            for i, (first, last) in enumerate(spans):
                if first <= mark_start < last:  # the span of this turn
                    first = output_start
                elif first >= end:
                    first += num_added
                if last > mark_start:
                    last += num_added
                spans[i] = (first, last)
        return text, spans


def split_turns(messages: Sequence[Message], turns: Sequence[Turn]) -> list[list[Message]]:
    """Return a conversation for each trained assistant turn, up to this turn; turns of earlier samples are masked.

    A conversation without reasoning in earlier turns stays whole, because a template writes all its turns alike.
    """
    if not earlier_reasoning(turns):
        return [list(messages)]
    samples: list[list[Message]] = []
    num_trained = 0  # turns that earlier samples contain
    for i, message in enumerate(messages):
        if message.role != "assistant" or message.masked:
            continue
        sample = [copy(earlier) for earlier in messages[: i + 1]]
        for trained in sample[:num_trained]:
            trained.masked = True
        samples.append(sample)
        num_trained = i + 1
    return samples or [list(messages)]


class OmittedTexts:
    """Kinds of texts that a chat template omitted."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def fingerprint_parts(self) -> list[Any]:
        """Return an empty list: tokens do not depend on it."""
        return []

    def add(self, *kinds: Sequence[str]) -> None:
        """Add kinds of texts."""
        self._kinds.update(*kinds)

    def take(self) -> list[str]:
        """Return the kinds since the last call, sorted."""
        kinds = sorted(self._kinds)
        self._kinds.clear()
        return kinds


def _omissible(template: ChatTemplate, turns: Sequence[Turn]) -> set[int]:
    """Return the turns whose reasoning is omitted because a user turn follows; see ``reasoning``."""
    return {index for index in earlier_reasoning(turns) if template.writes_reasoning(turns[index])}


def _omitted_tools(tools: Sequence[Any] | None, text: str) -> list[str]:
    """Return ``["tool definitions"]`` if a rendered text lacks the name of a tool."""
    for tool in tools or ():
        if not isinstance(tool, Mapping):
            continue
        name = None
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            name = function.get("name")
        if isinstance(name, str) and name not in text:
            return ["tool definitions"]
    return []


def _as_turn(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to the template's dict, without None fields; raise :class:`DataError` for media."""
    if not isinstance(message, Message):
        turn = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" in turn:
            turn["tool_calls"] = read_tool_calls(turn["tool_calls"])
        return turn
    if message.contains_media:
        raise DataError(f"the turn of '{message.role}' holds an image, but this tokenizer takes text only")
    role: str = message.role
    if role == "ipython":  # Llama 3's name, which other templates do not know
        role = "tool"
    turn = {"role": role, "content": message.text_content, **message.extra}
    if len(turn) == 2:  # fast path
        return turn
    if "tool_calls" in turn:  # of a message that was not made from a row
        turn["tool_calls"] = read_tool_calls(turn["tool_calls"] or [])
    for name in REASONING_FIELDS:
        if turn.get(name) is not None:
            # Templates read the first or the second field, so both are set.
            return {**dict.fromkeys(REASONING_FIELDS[:2], turn[name]), **turn}
    return turn


def hf_tokenizer(
    path: str,
    max_seq_len: int | None = None,
    chat_template: str | None = None,
    truncation_type: str = "right",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    parse_special_tokens: bool = False,
    reasoning: ReasoningPolicy = "strip",
    add_tokens: Sequence[str] | Mapping[str, str | None] = (),
) -> HuggingFaceModelTokenizer:
    """Load the tokenizer and chat template of a Hugging Face checkpoint.

    Args:
        path: the checkpoint's folder, or its ``tokenizer.json``, or a URL of one of them (``s3://bucket/model``).
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        chat_template: file or text of a template that replaces the checkpoint's.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.
        chat_template_kwargs: further template variables, for example ``{"enable_thinking": False}``.
        parse_special_tokens: encode special tokens in the text of a turn to their ids; by default they are plain text.
        reasoning: policy for the reasoning of earlier turns: ``"strip"`` (as the template does), ``"keep"`` or
            ``"split"``; see :class:`HuggingFaceModelTokenizer`.
        add_tokens: texts of tokens to add to the vocabulary, such as ``["<think>", "</think>"]``, or a mapping from
            these to texts that describe them. In a recipe, ``resize_token_embeddings=True`` gives them rows that are
            trained, and checkpoints hold them. A row begins as the mean of the rows of the description's tokens;
            without a description, of all tokens.

    Raises:
        DataError: a file is missing or broken, the template has an error, or a token to add or its description is
            empty.

    Example:
        >>> from torchtune.tokenizers import hf_tokenizer
        >>> tokenizer = hf_tokenizer(checkpoint, max_seq_len=512)
        >>> tokenizer.decode(tokenizer.encode("the cat", add_bos=False, add_eos=False))
        'the cat'
    """
    folder = local_path(path, "tokenizer.path").expanduser()
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        family_files = sorted(name for name in _FILES_OF_OTHER_FORMATS if (folder / name).is_file())
        if (folder / MISSING_TOKENIZER).is_file():
            remedy = f": {MISSING_TOKENIZER} in that folder says why, and what to do"
        elif family_files:
            remedy = f", but {', '.join(family_files)}: read that with the family's own tokenizer"
        else:
            remedy = ": download it"
        raise DataError(f"There is no tokenizer file {folder / 'tokenizer.json'}{remedy}.")
    file = folder
    if folder.is_dir():
        file = folder / "tokenizer.json"
    return HuggingFaceModelTokenizer(
        str(file),
        max_seq_len=max_seq_len,
        chat_template=chat_template,
        truncation_type=truncation_type,
        chat_template_kwargs=chat_template_kwargs,
        parse_special_tokens=parse_special_tokens,
        reasoning=reasoning,
        add_tokens=add_tokens,
    )
