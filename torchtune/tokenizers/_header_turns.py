"""Chat layout of Llama 3: turns with headers."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torchtune.data import DataError, Message, PromptTemplateInterface
from torchtune.tokenizers._chat_layouts import Part, TurnsTokenizer
from torchtune.tokenizers._files import PublishedFiles
from torchtune.tokenizers._tiktoken import CL100K_PATTERN, TikTokenBaseTokenizer


class HeaderTurns(TurnsTokenizer):
    """``tiktoken`` tokenizer with the chat layout of Llama: role header, text, end-of-turn token.

    Args:
        path: tiktoken rank file.
        special_tokens: text -> id; by default ``default_tokens`` of the class.
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        prompt_template: texts added to the turns before the layout is applied.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a special token that the layout needs is missing.
    """

    takes_images = False
    family: ClassVar[str] = "Llama 3"
    pattern: ClassVar[str] = CL100K_PATTERN
    default_tokens: ClassVar[Mapping[str, int]]
    # Special tokens: begin and end of text, begin and end of a header, end of message, end of turn, and others.
    required: ClassVar[tuple[str, ...]] = (
        "begin_of_text",
        "end_of_text",
        "start_header_id",
        "end_header_id",
        "eom_id",
        "eot_id",
        "python_tag",
    )
    # Padding, and the step between messages.
    optional: ClassVar[tuple[str, str]] = ("finetune_right_pad_id", "step_id")

    def __init__(
        self,
        path: str,
        special_tokens: Mapping[str, int] | None = None,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        super().__init__(max_seq_len, prompt_template, truncation_type)
        self.published = PublishedFiles(path)
        if special_tokens is None:
            special_tokens = self.default_tokens
        self.special_tokens = dict(special_tokens)
        missing = [f"<|{name}|>" for name in self.required if f"<|{name}|>" not in self.special_tokens]
        if missing:
            raise DataError(f"special_tokens lacks {', '.join(missing)}, which {self.family}'s layout needs.")
        # A subclass may name the tokens differently, in the same order.
        required_ids = [self.special_tokens[f"<|{name}|>"] for name in self.required]
        self.bos_id, self.eos_id = required_ids[:2]
        self.start_header_id, self.end_header_id = required_ids[2:4]
        self.eom_id, self.eot_id = required_ids[4:6]
        self.python_tag = self.special_tokens.get("<|python_tag|>")
        self._special_ids = frozenset(self.special_tokens.values())
        pad_name, step_name = self.optional
        self.pad_id = self.special_tokens.get(f"<|{pad_name}|>", self.eos_id)
        self.step_id = self.special_tokens.get(f"<|{step_name}|>")
        self.image_id = self.special_tokens.get("<|image|>")
        self.stop_tokens = [self.eos_id, self.eot_id, self.eom_id]
        self.tt_model = TikTokenBaseTokenizer(
            path=path,
            name=f"{self.family} (tiktoken)",
            pattern=self.pattern,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            special_tokens=self.special_tokens,
        )

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` by ``tokens`` and ``mask`` (True = not trained on).

        Args:
            sample: has ``messages``.
            inference: leave the last turn open for the model to continue.

        Raises:
            DataError: the messages do not fit the chat layout, or contain images and the class does not process images.
        """
        sample = super().__call__(sample, inference)
        if not self.takes_images and self.image_id in sample["tokens"]:  # no text encodes to image_id
            raise DataError(
                f"a turn holds an image, but {type(self).__name__} takes text only: use the transform of a vision model"
            )
        return sample

    @property
    def base_vocab_size(self) -> int:
        """Number of tokens without special tokens."""
        return self.tt_model.base_vocab_size

    @property
    def vocab_size(self) -> int:
        """Largest token id that occurs in text, plus 1: the number of rows of a text model's embedding.

        The id of ``<|image|>`` is larger; only vision models embed it.
        """
        ids = {token_id for token, token_id in self.special_tokens.items() if token != "<|image|>"}
        return max(self.base_vocab_size - 1, *ids) + 1

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; special tokens in it are encoded as plain text."""
        return self.tt_model.encode(text, add_bos=add_bos, add_eos=add_eos)

    def decode(self, token_ids: list[int], truncate_at_eos: bool = True, skip_special_tokens: bool = True) -> str:
        """Decode token ids into text.

        Args:
            token_ids: ids to decode.
            truncate_at_eos: stop at the first ``<|end_of_text|>``.
            skip_special_tokens: omit headers (``<|start_header_id|>user<|end_header_id|>``) and special tokens.
        """
        token_ids = list(token_ids)
        if truncate_at_eos and self.eos_id in token_ids:
            token_ids = token_ids[: token_ids.index(self.eos_id)]
        if not skip_special_tokens:
            return self.tt_model.decode(token_ids, truncate_at_eos=False)
        texts: list[str] = []
        text_ids: list[int] = []  # ids since the last special token
        is_header = False
        follows_header = False
        for token_id in (*token_ids, None):
            if token_id is not None and token_id not in self._special_ids:
                text_ids.append(token_id)
                continue
            if not is_header:
                text = self.tt_model.decode(text_ids, truncate_at_eos=False)
                if follows_header:
                    text = text.removeprefix("\n\n")
                texts.append(text)
            text_ids = []
            is_header = token_id == self.start_header_id
            follows_header = token_id == self.end_header_id
        return "".join(texts)

    def _body(self, message: Message) -> list[int]:
        """Return the token ids of a message between its header and the end-of-turn token."""
        ids: list[int] = []
        if message.ipython and self.python_tag is not None:
            ids.append(self.python_tag)
        if message.extra.get("tool_calls") and not (message.text_content and message.masked):
            raise DataError(
                f"{type(self).__name__} has no layout for structured tool_calls: write the call as the turn's text, or "
                "use the checkpoint's own chat template (torchtune.tokenizers.hf_tokenizer)."
            )
        for item in message.content:
            if item["type"] == "text":
                ids += self.encode(item["content"].strip(), add_bos=False, add_eos=False)
            elif item["type"] == "image" and self.image_id is not None:
                ids += self._image_ids(item["content"])
            else:
                raise DataError(f"{self.family}'s layout has no place for content of type '{item['type']}'.")
        return ids

    def _image_ids(self, image: Any) -> list[int]:
        """Return the token ids of an image in the text; models with image tokens have several."""
        return [self.image_id]

    def tokenize_message(
        self, message: Message, *, add_start_tokens: bool = True, add_end_tokens: bool = True
    ) -> list[int]:
        """Tokenize one message: header, text, ``<|eot_id|>`` (``<|eom_id|>`` if ``message.eot`` is False).

        Args:
            message: the message.
            add_start_tokens: add the header.
            add_end_tokens: add the end-of-turn token.

        Raises:
            DataError: the layout does not support the content.
        """
        ids: list[int] = []
        if add_start_tokens:
            role = self.encode(message.role.strip(), add_bos=False, add_eos=False)
            newlines = self.encode("\n\n", add_bos=False, add_eos=False)
            ids = [self.start_header_id, *role, self.end_header_id, *newlines]
        ids += self._body(message)
        if add_end_tokens:
            if message.eot:
                ids.append(self.eot_id)
            else:  # the assistant's turn goes on behind the answer of a tool
                ids.append(self.eom_id)
        return ids

    def _parts(self, messages: list[Message], closed: bool) -> Iterator[Part]:
        yield [self.bos_id], True
        for i, message in enumerate(messages):
            is_last = i == len(messages) - 1
            yield self.tokenize_message(message, add_end_tokens=closed or not is_last), message.masked
        if closed:
            yield [self.eos_id], True
