"""Text of tokens as they arrive."""

from typing import Any


class StreamDecoder:
    """Decodes tokens one by one and never gives half a character.

    A character may be spread over several tokens; :meth:`put` gives nothing until the last of them is there. Only
    the tokens since the last complete text are decoded again, so the cost per token does not grow.

    Args:
        tokenizer: has ``decode(token_ids)``.

    Example:
        >>> from torchtune.modules.transforms.tokenizers import StreamDecoder
        >>> decoder = StreamDecoder(tokenizer)
        >>> "".join([*map(decoder.put, tokenizer.encode("the cat", add_eos=False)), decoder.end()])
        'the cat'
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._context: list[int] = []  # complete text, kept because some tokens' text depends on what is before
        self._pending: list[int] = []

    def put(self, token: int) -> str:
        """Text that became complete with ``token``; may be empty."""
        self._pending.append(token)
        before = self.tokenizer.decode(self._context)
        after = self.tokenizer.decode(self._context + self._pending)
        if after.endswith("\ufffd"):
            return ""
        self._context, self._pending = (self._context + self._pending)[-8:], []
        return self._added(before, after)

    def end(self) -> str:
        """The rest of the text: a replacement character if the tokens end inside a character."""
        before = self.tokenizer.decode(self._context)
        after = self.tokenizer.decode(self._context + self._pending)
        self._context, self._pending = [], []
        return self._added(before, after)

    @staticmethod
    def _added(before: str, after: str) -> str:
        return after[len(before) :]
