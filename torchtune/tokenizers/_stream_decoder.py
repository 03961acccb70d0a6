"""Streaming decoder."""

from typing import Any


class StreamDecoder:
    """Decodes tokens one by one and returns only complete characters.

    A character may span several tokens; :meth:`put` returns an empty string until the last one arrives. Only a few
    recent tokens are decoded again, so the cost per token is constant.

    Args:
        tokenizer: has ``decode(token_ids)``.

    Example:
        >>> from torchtune.tokenizers import StreamDecoder
        >>> decoder = StreamDecoder(tokenizer)
        >>> "".join([*map(decoder.put, tokenizer.encode("the cat", add_eos=False)), decoder.end()])
        'the cat'
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._context: list[int] = []  # complete text; some tokens decode differently after other tokens
        self._pending: list[int] = []

    def put(self, token: int) -> str:
        """Return the text that ``token`` completes; may be empty."""
        self._pending.append(token)
        before = self.tokenizer.decode(self._context)
        after = self.tokenizer.decode(self._context + self._pending)
        if after.endswith("\ufffd"):
            return ""
        self._context, self._pending = (self._context + self._pending)[-8:], []
        return self._added(before, after)

    def end(self) -> str:
        """Return the remaining text; an incomplete character becomes the replacement character."""
        before = self.tokenizer.decode(self._context)
        after = self.tokenizer.decode(self._context + self._pending)
        self._context, self._pending = [], []
        return self._added(before, after)

    @staticmethod
    def _added(before: str, after: str) -> str:
        return after[len(before) :]
