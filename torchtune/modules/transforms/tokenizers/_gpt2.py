"""GPT-2's byte-level BPE."""

from torchtune.modules.transforms.tokenizers._byte_level_bpe import ByteLevelBPE, bytes_to_unicode
from torchtune.modules.transforms.tokenizers._protocols import BaseTokenizer

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\w]+| ?\d+| ?[^\s\w\d]+|\s+(?!\S)|\s+"


class GPT2BaseTokenizer(BaseTokenizer):
    """Text to ids and back.

    Args:
        vocab_path: ``vocab.json``.
        merges_path: ``merges.txt``.
        unk_id: accepted for compatibility; every byte has a token.
        bos_id: token put first, if asked.
        eos_id: token put last, if asked.
        pad_id: token of padding.

    Raises:
        DataError: a file is missing or broken.

    Example:
        >>> vocab, merges = folder / "vocab.json", folder / "merges.txt"
        >>> _ = vocab.write_text('{"a": 0, "b": 1, "ab": 2}'), merges.write_text("a b\\n")
        >>> torchtune.modules.transforms.tokenizers.GPT2BaseTokenizer(vocab, merges).encode("ab")
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
        self._bpe = ByteLevelBPE(vocab_path, merges_path, pattern=GPT2_PATTERN, special_tokens={}, nfc=False)
        self.unk_id, self.bos_id, self.eos_id, self.pad_id = unk_id, bos_id, eos_id, pad_id

    @property
    def vocab_size(self) -> int:
        """One more than the largest id of the vocabulary."""
        return self._bpe.vocab_size

    def bpe(self, token: str) -> str:
        """The parts, with spaces between, of a word that is written in the characters that stand for bytes."""
        to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
        text = bytes(to_byte[character] for character in token).decode("utf-8", errors="replace")
        return " ".join(part.value for part in self._bpe.tokenizer.model.tokenize(token)) if text else ""

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of ``text``."""
        ids = self._bpe.encode(text)
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_id] if add_eos and self.eos_id is not None else ids

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids."""
        return self._bpe.decode(tokens)
