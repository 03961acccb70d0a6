"""GPT-2's byte-level BPE."""

from torchtune.tokenizers._byte_level_bpe import ByteLevelBPE
from torchtune.tokenizers._cached_bpe import bytes_to_unicode
from torchtune.tokenizers._protocols import BaseTokenizer
from torchtune.tokenizers._tokenizer_files import PublishedFiles, SavesPublishedFiles

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\w]+| ?\d+| ?[^\s\w\d]+|\s+(?!\S)|\s+"


class GPT2BaseTokenizer(SavesPublishedFiles, BaseTokenizer):
    """GPT-2 tokenizer for plain text.

    Args:
        vocab_path: ``vocab.json``.
        merges_path: ``merges.txt``.
        unk_id: accepted for compatibility; every byte has a token.
        bos_id: BOS token, added first if ``add_bos``.
        eos_id: EOS token, added last if ``add_eos``.
        pad_id: padding token.

    Raises:
        DataError: a file is missing or broken.

    Example:
        >>> vocab, merges = folder / "vocab.json", folder / "merges.txt"
        >>> _ = vocab.write_text('{"a": 0, "b": 1, "ab": 2}'), merges.write_text("a b\\n")
        >>> torchtune.tokenizers.GPT2BaseTokenizer(vocab, merges).encode("ab")
        [2]
    """

    def __init__(
        self,
        vocab_path: str,
        merges_path: str,
        unk_id: int | None = None,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
    ) -> None:
        self.published = PublishedFiles(vocab_path)
        self._bpe = ByteLevelBPE(vocab_path, merges_path, pattern=GPT2_PATTERN, special_tokens={}, nfc=False)
        self.unk_id, self.bos_id, self.eos_id, self.pad_id = unk_id, bos_id, eos_id, pad_id

    @property
    def vocab_size(self) -> int:
        """Largest id of the vocabulary plus 1."""
        return self._bpe.vocab_size

    def bpe(self, token: str) -> str:
        """Split a word, written in GPT-2's byte-to-unicode characters, into BPE tokens joined by spaces."""
        to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
        text = bytes(to_byte[character] for character in token).decode("utf-8", errors="replace")
        return " ".join(part.value for part in self._bpe.tokenizer.model.tokenize(token)) if text else ""

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids."""
        ids = self._bpe.encode(text)
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_id] if add_eos and self.eos_id is not None else ids

    def decode(self, tokens: list[int]) -> str:
        """Decode token ids into text."""
        return self._bpe.decode(tokens)
