"""Template of a reranker: a query and a document in one sequence."""

import re
from dataclasses import dataclass
from typing import Any

from torchtune.data._rows import DataError

RERANKER_FILE = "reranker_config.json"  # file of a checkpoint with the template of a reranker
DEFAULT_PAIR_TEMPLATE = "Query: {query}\nDocument: {document}"
_PLACEHOLDER = re.compile(r"\{query\}|\{document\}")


@dataclass(frozen=True)
class PairTemplate:
    """Template that puts a query and a document into one sequence, whose last token a reranker scores.

    Args:
        text: text with ``{query}`` and ``{document}``. Control tokens of the tokenizer in it are control tokens; in
            queries and documents they are plain text.
        add_eos: end the sequence with the EOS token.

    Raises:
        DataError: ``text`` does not have ``{query}`` and ``{document}`` once each.

    Example:
        >>> template = torchtune.data.PairTemplate("{query}: {document}")
        >>> tokenizer.decode(template.tokens(tokenizer, "who sees", "the cat"))
        'who sees: the cat'
    """

    text: str = DEFAULT_PAIR_TEMPLATE
    add_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("{query}", "{document}"):
            count = self.text.count(name)
            if count != 1:
                raise DataError(f"template: '{name}' must be in it once, not {count} times: {self.text!r}.")

    def tokens(self, tokenizer: Any, query: str, document: str, max_seq_len: int | None = None) -> list[int]:
        """Return the token ids of a pair; too long ones are cut before the end of the template.

        Args:
            tokenizer: tokenizer of the model.
            query: the query.
            document: the document.
            max_seq_len: maximum number of tokens; by default there is none.
        """
        tokens = self._encode(tokenizer, self.text, {"{query}": query, "{document}": document})
        if max_seq_len is None or len(tokens) <= max_seq_len:
            return tokens
        # The score is read at the end of the template, which stays where it is tokens of its own.
        end = self._encode(tokenizer, _PLACEHOLDER.split(self.text)[-1], {}, is_end=True)
        if not end or tokens[-len(end) :] != end or len(end) >= max_seq_len:
            return tokens[:max_seq_len]
        return tokens[: max_seq_len - len(end)] + end

    def _encode(self, tokenizer: Any, text: str, values: dict[str, str], *, is_end: bool = False) -> list[int]:
        """Return the token ids of the template, or of its end, with the values of the placeholders."""
        # Control tokens in a text are plain text; tokenizers without `encode_text` never parse them.
        encode = getattr(tokenizer, "encode_text", tokenizer.encode)
        control_tokens = getattr(tokenizer, "special_tokens", {})
        pieces = [text]
        if control_tokens:
            longest_first = sorted(control_tokens, key=len, reverse=True)
            pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        tokens: list[int] = []
        for index, piece in enumerate(pieces):
            is_start = index == 0 and not is_end
            if piece in control_tokens:
                tokens.append(control_tokens[piece])
            elif piece or is_start:
                filled = _PLACEHOLDER.sub(lambda match: values[match[0]], piece)
                tokens += encode(text=filled, add_bos=is_start, add_eos=False)
        if self.add_eos:
            tokens.append(tokenizer.eos_id)
        return tokens

    def chat_template(self, tokenizer: Any) -> str:
        """Return a Jinja template that renders messages of the roles ``query`` and ``document`` to the same sequence.

        This is how ``CrossEncoder`` of ``sentence-transformers`` renders a pair.
        """
        text_of_id = {token: text for text, token in getattr(tokenizer, "special_tokens", {}).items()}
        start = list(tokenizer.encode("", add_bos=True, add_eos=False))
        pieces = [_literal("".join(text_of_id.get(token, "") for token in start))]
        position = 0
        for match in _PLACEHOLDER.finditer(self.text):
            role = match[0].strip("{}")
            pieces.append(_literal(self.text[position : match.start()]))
            pieces.append(f"{{% for message in messages if message['role'] == '{role}' %}}")
            pieces.append("{{ message['content'] }}{% endfor %}")
            position = match.end()
        end = self.text[position:]
        if self.add_eos:
            end += text_of_id.get(tokenizer.eos_id, "")
        return "".join([*pieces, _literal(end)])


def _literal(text: str) -> str:
    """Return Jinja that renders to a text."""
    if not text:
        return ""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"{{{{ '{escaped}' }}}}"
