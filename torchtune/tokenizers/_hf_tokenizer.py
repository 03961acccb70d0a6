"""Tokenizers from a Hugging Face ``tokenizer.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from torchtune.data import DataError
from torchtune.tokenizers._control_tokens import ControlTokenEncoder, ControlTokens
from torchtune.tokenizers._files import PublishedFiles, read_json
from torchtune.tokenizers._protocols import BaseTokenizer, check_text
from torchtune.utils import local_path, write_json

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
        self.encoder = ControlTokenEncoder(self.tokenizer, self.control_tokens)
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
        """Add the tokens that only ``tokenizer_config.json`` defines, in the order of their ids."""
        entries = self.config.get("added_tokens_decoder", {})
        for token_id in sorted(entries, key=int):
            entry = entries[token_id]
            if self.tokenizer.token_to_id(entry["content"]) is not None:
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
        if isinstance(texts, Mapping):
            for text in new_texts:
                if texts[text] is not None:
                    self.described_tokens[text] = self._describe(text, texts[text])
        first_id = self.vocab_size
        self.tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in new_texts])
        ids = [self.tokenizer.token_to_id(text) for text in new_texts]
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
        ids, _ = self.encoder.encode_masked(self.control_tokens.hide(text), [])
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
