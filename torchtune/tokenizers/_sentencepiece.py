"""SentencePiece tokenizer."""

from sentencepiece import SentencePieceProcessor

from torchtune.data import DataError
from torchtune.tokenizers._protocols import BaseTokenizer, check_text
from torchtune.tokenizers._tokenizer_files import PublishedFiles, SavesPublishedFiles, existing_file

WHITESPACE_CHARS = [" ", "\n", "\t", "\r", "\v"]


class SentencePieceBaseTokenizer(SavesPublishedFiles, BaseTokenizer):
    """``sentencepiece`` tokenizer for plain text.

    Args:
        path: ``tokenizer.model``.

    Raises:
        DataError: the file is missing or broken.

    Example:
        >>> from torchtune.tokenizers import SentencePieceBaseTokenizer
        >>> reader = SentencePieceBaseTokenizer("/tmp/Llama-2-7b-hf/tokenizer.model")  # doctest: +SKIP
    """

    def __init__(self, path: str) -> None:
        self.published = PublishedFiles(path)
        file = existing_file(path, "tokenizer file")
        self.spm_model = SentencePieceProcessor()
        try:
            self.spm_model.Load(str(file))
        except (OSError, RuntimeError, TypeError) as error:
            raise DataError(f"tokenizer file {path} is not a SentencePiece model: download it again.") from error
        self.vocab_size: int = self.spm_model.vocab_size()
        self.bos_id: int = self.spm_model.bos_id()
        self.eos_id: int = self.spm_model.eos_id()
        self.pad_id: int = self.spm_model.pad_id()
        self.encodes_whitespace = any(self.spm_model.encode(character) for character in WHITESPACE_CHARS)

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        add_eos: bool = True,
        trim_leading_whitespace: bool = False,
        prefix: str | None = None,
    ) -> list[int]:
        """Encode ``text`` into token ids.

        Args:
            text: text to encode.
            add_bos: add the BOS token first.
            add_eos: add the EOS token last.
            trim_leading_whitespace: add no leading space, for a text that continues another: ``prefix + text`` is
                encoded and the prefix's ids are removed.
            prefix: text for ``trim_leading_whitespace``; a newline by default.
        """
        check_text(text)
        if trim_leading_whitespace and self.encodes_whitespace:
            prefix = "\n" if prefix is None else prefix
            skipped = len(self.spm_model.encode(prefix, add_bos=add_bos, add_eos=False))
            ids = self.spm_model.encode(prefix + text, add_bos=add_bos, add_eos=add_eos)[skipped:]
            return [self.bos_id, *ids] if add_bos else ids
        return self.spm_model.encode(text, add_bos=add_bos, add_eos=add_eos, out_type=int)

    def decode(self, ids: list[int]) -> str:
        """Decode token ids into text."""
        return self.spm_model.decode(list(ids))
