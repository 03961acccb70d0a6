"""Tokenizers from a Hugging Face ``tokenizer.json``: for texts, and for conversations with the checkpoint's template.

A conversation is rendered as one text (``_chat_template``), in which the spans are located that are trained on
(``_trained_spans``); then the text is encoded, with a mask (``_masked_encoding``).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import AddedToken, Tokenizer

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
from torchtune.tokenizers._chat_template import ChatTemplate
from torchtune.tokenizers._earlier_reasoning import KeptReasoning, earlier_reasoning, split_turns, stripped_turns
from torchtune.tokenizers._files import MISSING_TOKENIZER, PublishedFiles, read_json, replace_template, template_sources
from torchtune.tokenizers._masked_encoding import ControlTokens, MaskedEncoder, TokensAndMask
from torchtune.tokenizers._protocols import (
    BaseTokenizer,
    MessageTransform,
    ModelTokenizer,
    adds_end_tokens,
    check_text,
    messages_of,
    row_of,
)
from torchtune.tokenizers._trained_spans import LayoutCache, Span, Turn, TurnFinder, learn_stops
from torchtune.utils import get_logger, local_path, log_once, write_json

# Keys of special tokens in tokenizer_config.json.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Options of tokens in its added_tokens_decoder.
_ADDED_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens of a ``tokenizer_config.json``, for example ``{"bos_token": "<s>"}``."""
    tokens = {name: config.get(name) for name in NAMED_TOKENS}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, Mapping):  # a list has no names
        tokens |= extra
    named = {}
    for name, token in tokens.items():
        text = token
        if isinstance(token, Mapping):  # {"content": text, ...}
            text = token.get("content")
        if text:
            named[name] = text
    return named


def _load(path: str | Path) -> Tokenizer:
    """Load a ``tokenizer.json``, without its padding and truncation; raise :class:`DataError` if it is broken."""
    try:
        tokenizer = Tokenizer.from_file(str(Path(path).expanduser()))
    except Exception as error:  # the tokenizers package raises a plain Exception
        read_json(path, "tokenizer file")  # raises a clearer error if the file is missing or not JSON
        raise DataError(f"tokenizer file {path} is not one that the tokenizers package reads: {error}.") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class HuggingFaceBaseTokenizer(BaseTokenizer):
    """``tokenizers`` tokenizer for plain text.

    As in ``transformers``, ``add_bos_token`` of ``tokenizer_config.json`` decides whether texts begin with the BOS
    token; by default they do if the post-processor of ``tokenizer.json`` adds it.

    Args:
        tokenizer_json_path: ``tokenizer.json``.
        tokenizer_config_json_path: ``tokenizer_config.json``, which names the special tokens; by default the one in the
            same folder, if any.
        generation_config_path: ``generation_config.json``, which has the EOS ids of generation; by default the one in
            the same folder, if any.
        parse_special_tokens: encode special tokens in training data to their ids; by default they are plain text.
        add_tokens: texts of tokens to add to the vocabulary, such as ``<think>``; or a mapping from these to texts that
            describe them, or None, such as ``{"<think>": "start of reasoning"}``. They are not special: texts of the
            data that spell them are encoded to their ids. Those that the vocabulary has already keep their ids.

    Attributes:
        end_ids: tokens that the files put at the end of every text, such as those of embedding models; mostly none.
        new_tokens: the added tokens that the files do not have; their ids are the last ones.
        described_tokens: token ids of the description of each new token that has one, by its text.

    Raises:
        DataError: a file is missing or broken, or a token to add or its description is empty.

    Example:
        >>> from torchtune.tokenizers import HuggingFaceBaseTokenizer
        >>> tokenizer = HuggingFaceBaseTokenizer(str(checkpoint / "tokenizer.json"))
        >>> tokenizer.decode(tokenizer.encode("the cat"))
        'the cat'
    """

    def __init__(
        self,
        tokenizer_json_path: str,
        *,
        tokenizer_config_json_path: str | None = None,
        generation_config_path: str | None = None,
        parse_special_tokens: bool = False,
        add_tokens: Sequence[str] | Mapping[str, str | None] = (),
    ) -> None:
        tokenizer_json_path = local_path(tokenizer_json_path, "tokenizer.tokenizer_json_path").expanduser()
        folder = tokenizer_json_path.parent
        self.tokenizer = _load(tokenizer_json_path)
        self.published = PublishedFiles(tokenizer_json_path)
        self.config = self._read(folder, tokenizer_config_json_path, "tokenizer_config.json")
        self.generation_config = self._read(folder, generation_config_path, "generation_config.json")
        self.named_tokens = named_special_tokens(self._read(folder, None, "special_tokens_map.json"))
        self.named_tokens |= named_special_tokens(self.config)  # newer than the map
        self._complete_added_tokens()
        self._loaded_size = self.tokenizer.get_vocab_size()  # tokens that are added from here on have to be saved
        self.described_tokens: dict[str, list[int]] = {}
        self.new_tokens = self._add_tokens(add_tokens)
        self.special_tokens: dict[str, int] = {}
        for token_id, token in self.tokenizer.get_added_tokens_decoder().items():
            if token.special:  # others, such as <think>, are parsed in every text
                self.special_tokens[token.content] = token_id
        self._generation_eos = self._ids(self.generation_config.get("eos_token_id"))
        self.bos_id = self._named_id("bos_token", "bos_token_id")
        self.eos_id = self._named_id("eos_token", "eos_token_id")
        pad_id = self._named_id("pad_token", "pad_token_id")
        if pad_id is None:
            pad_id = self.eos_id
        if pad_id is None:
            pad_id = 0  # padding is never trained on, whatever its id
        self.pad_id: int = pad_id
        hidden_tokens: list[str] = []  # in texts of training data
        if not parse_special_tokens:
            hidden_tokens = list(self.special_tokens)
        self.control_tokens = ControlTokens(hidden_tokens)
        self.encoder = MaskedEncoder(self.tokenizer, self.control_tokens)
        adds_bos = self.config.get("add_bos_token")
        if not isinstance(adds_bos, bool):  # not configured: as the post-processor of tokenizer.json does
            adds_bos = self.tokenizer.encode("a").ids[:1] == [self.bos_id]
        self.adds_bos = adds_bos and self.bos_id is not None
        self.end_ids = self._published_end()

    def save_files(self, folder: str | Path) -> None:
        """Write the files from which ``transformers`` and :func:`hf_tokenizer` load this tokenizer.

        Published files are copied. ``tokenizer.json`` is written anew if it has changed since it was read, or if tokens
        were added to :attr:`tokenizer`.

        Args:
            folder: existing folder of a checkpoint.
        """
        folder = Path(folder)
        self.published.copy(folder)
        target = folder / "tokenizer.json"
        is_published = self.published.is_unchanged and self.published.path.name == target.name
        if not is_published or self.tokenizer.get_vocab_size() != self._loaded_size:
            self.tokenizer.save(str(target))
        config_path = folder / "tokenizer_config.json"
        is_copied = config_path.is_file() and read_json(config_path, config_path.name) == self.config
        if self.config and not is_copied:
            write_json(config_path, self.config)

    @staticmethod
    def _read(folder: Path, path: str | None, name: str) -> dict[str, Any]:
        """Return the content of a JSON file, by default of ``name`` in the folder, where it may be missing."""
        if path is None and not (folder / name).is_file():
            return {}
        return read_json(path or folder / name, name)

    def _complete_added_tokens(self) -> None:
        """Add the tokens that only ``tokenizer_config.json`` defines, in the order of their ids.

        Named tokens that are not special yet become so, such as a ``pad_token`` that is a word of the vocabulary.
        """
        entries = self.config.get("added_tokens_decoder", {})
        for token_id in sorted(entries, key=int):
            entry = entries[token_id]
            if self.tokenizer.token_to_id(entry["content"]) is not None:  # `tokenizer.json` has it
                continue
            # `add_tokens` gives the next id, whatever the file says.
            if int(token_id) != self.tokenizer.get_vocab_size():
                raise DataError(
                    f"tokenizer_config.json gives '{entry['content']}' the id {token_id}, but the vocabulary of "
                    f"tokenizer.json ends at {self.tokenizer.get_vocab_size() - 1}: the two files differ in origin."
                )
            options = {name: entry[name] for name in _ADDED_TOKEN_OPTIONS if name in entry}
            self.tokenizer.add_tokens([AddedToken(entry["content"], **options)])
        added = {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        missing = [token for token in self.named_tokens.values() if token not in added]
        self.tokenizer.add_special_tokens([AddedToken(token, special=True) for token in dict.fromkeys(missing)])

    def _add_tokens(self, texts: Sequence[str] | Mapping[str, str | None]) -> list[str]:
        """Add tokens behind the vocabulary; return those that were not in it, and keep the ids of descriptions."""
        if isinstance(texts, str):
            raise DataError(f"tokenizer.add_tokens is the text {texts!r}: give a list of tokens, [{texts}].")
        for text in texts:
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"tokenizer.add_tokens: {text!r} is not a token: give texts, such as '<think>'.")
        new_texts = [text for text in dict.fromkeys(texts) if self.tokenizer.token_to_id(text) is None]
        if not new_texts:
            return []
        # Described before any is added, so that a description is encoded to rows that the model has learned.
        if isinstance(texts, Mapping):
            for text in new_texts:
                if texts[text] is not None:
                    self.described_tokens[text] = self._describe(text, texts[text])
        first_id = self.vocab_size
        self.tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in new_texts])
        ids = [self.tokenizer.token_to_id(text) for text in new_texts]
        # The package counts the tokens for the next id, which is taken or too small if the ids have gaps.
        if ids != list(range(first_id, first_id + len(ids))):
            raise DataError(
                f"tokenizer.add_tokens: the ids of the vocabulary have gaps before {first_id}, so that new tokens "
                "would get ids between others: add the tokens to tokenizer.json."
            )
        return new_texts

    def _describe(self, text: str, description: Any) -> list[int]:
        """Return the token ids of the description of a new token, in the vocabulary without new tokens."""
        token_ids = []
        if isinstance(description, str) and description.strip():
            token_ids = self.tokenizer.encode(description, add_special_tokens=False).ids
        if not token_ids:
            raise DataError(
                f"tokenizer.add_tokens: the description of '{text}' is {description!r}: give a text, such as 'start of "
                "reasoning', or null to begin with the mean of all rows."
            )
        return token_ids

    @staticmethod
    def _ids(value: int | list[int] | None) -> list[int]:
        """Return the ids of a setting of ``generation_config.json``."""
        if value is None:
            return []
        if isinstance(value, int):
            return [value]
        return list(value)

    def _named_id(self, name: str, generation_name: str) -> int | None:
        """Return the id of a named token, by default the first one of a setting of ``generation_config.json``."""
        if name in self.named_tokens:
            return self.tokenizer.token_to_id(self.named_tokens[name])
        ids = self._ids(self.generation_config.get(generation_name))
        if not ids:
            return None
        return ids[0]

    def _published_end(self) -> list[int]:
        """Return the tokens that the post-processor of ``tokenizer.json``, or ``add_eos_token``, puts behind a text."""
        with_tokens = self.tokenizer.encode("a").ids
        text = self.tokenizer.encode("a", add_special_tokens=False).ids
        for start in range(len(with_tokens) - len(text)):  # the tokens before the text
            if with_tokens[start : start + len(text)] == text:
                return with_tokens[start + len(text) :]
        # The post-processor puts nothing behind a text, which leaves it to the config.
        if self.config.get("add_eos_token") is True and self.eos_id is not None:
            return [self.eos_id]
        return []

    @property
    def vocab_size(self) -> int:
        """Largest id plus 1."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def stop_tokens(self) -> list[int]:
        """Ids that end generation."""
        ids = list(self._generation_eos)
        if self.eos_id is not None:
            ids.insert(0, self.eos_id)
        return list(dict.fromkeys(ids))

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; special tokens in it become their ids.

        Args:
            text: text to encode.
            add_bos: begin with the BOS token, if this tokenizer adds it.
            add_eos: end with the EOS token, if the tokenizer has one.

        Raises:
            DataError: ``text`` is not a string.
        """
        check_text(text)
        return self._framed(self.tokenizer.encode(text, add_special_tokens=False).ids, add_bos, add_eos)

    def encode_text(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode a text of training data: special tokens in it are plain text, unless ``parse_special_tokens``."""
        check_text(text)
        ids, _ = self.encoder.encode(self.control_tokens.hide(text), [])
        return self._framed(ids.tolist(), add_bos, add_eos)

    def _framed(self, ids: list[int], add_bos: bool, add_eos: bool) -> list[int]:
        """Return ids with the BOS token before and the EOS token behind them, as far as they are asked for."""
        if add_bos and self.adds_bos:
            ids = [self.bos_id, *ids]
        if add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids into text."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


# Policy for reasoning before the last user turn.
ReasoningPolicy = Literal["strip", "keep", "split"]
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
        self._special_texts = tuple(self.special_tokens)  # str.endswith takes tuples only
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
        self._omitted = OmittedTexts()
        self._set_stops()
        self._layouts = LayoutCache(self._stops, list(self.special_tokens))

    def _set_stops(self) -> None:
        """Set the stop tokens: those of the checkpoint's config files and those learned from the chat template."""
        configured_ids = self.base_tokenizer.stop_tokens
        text_of_id = {token_id: text for text, token_id in self.special_tokens.items()}
        configured = [text_of_id[token_id] for token_id in configured_ids if token_id in text_of_id]
        generation_stops: list[str] = []
        stops: list[str] = []
        if "default" in self.chat_templates:
            template = self.chat_templates["default"]
            generation_stops, stops = learn_stops(template, list(self.special_tokens), configured)
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
            kept_reasoning = KeptReasoning(self._template(tools), turns, tools)
            turns = kept_reasoning.turns
        if closed:
            text, spans = self._finished_text(turns, [message.masked for message in messages], tools)
            for i, message in enumerate(messages):
                if not message.masked and message.has_untrained_parts:
                    spans = self._without_parts(i, messages, turns, tools, spans)
        else:
            text = self._open_text(turns, tools)
            spans = []
        if kept_reasoning is not None:  # the text has marks in place of the reasoning
            text, spans = kept_reasoning.restore(text, spans)
        tokens, mask = self._encoder.encode(text, spans)
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
        if turns[-1]["role"] == "assistant":  # the template would end this turn: its text follows the generation prompt
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
            finder = TurnFinder(template, turns, text, self._stops, list(self.special_tokens), tools=tools)
            self._omitted.add(finder.omitted(stripped_turns(template, turns)))
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
                spans = self._layouts.spans(template, turns, text, masked)
            if spans is None:  # the template strips or rearranges a text, or the turns have more than a role and a text
                finder = TurnFinder(template, turns, text, self._stops, list(self.special_tokens), tools=tools)
                spans = finder.trained(masked, generated)
                self._omitted.add(finder.omitted(stripped_turns(template, turns)), _omitted_tools(tools, text))
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
                spans = _subtract_span(spans, (position, part_end))
            position = part_end
        return spans


def _subtract_span(spans: Sequence[Span], removed: Span) -> list[Span]:
    """Return spans without the characters of ``removed``."""
    remaining: list[Span] = []
    for start, end in spans:
        before = (start, min(end, removed[0]))
        after = (max(start, removed[1]), end)
        if before[0] < before[1]:
            remaining.append(before)
        if after[0] < after[1]:
            remaining.append(after)
    return remaining


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
    if len(turn) == 2:  # fast path: role and text
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
