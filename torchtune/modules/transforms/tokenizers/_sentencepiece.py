"""SentencePiece models."""

from sentencepiece import SentencePieceProcessor

from torchtune.modules.transforms.tokenizers._files import broken_file, existing_file
from torchtune.modules.transforms.tokenizers._protocols import BaseTokenizer, check_text

WHITESPACE_CHARS = [" ", "\n", "\t", "\r", "\v"]


class SentencePieceBaseTokenizer(BaseTokenizer):
    """Text to ids and back with the ``sentencepiece`` package.

    Args:
        path: ``tokenizer.model``.

    Raises:
        DataError: the file is missing or broken.

    Example:
        >>> from torchtune.modules.transforms.tokenizers import SentencePieceBaseTokenizer
        >>> reader = SentencePieceBaseTokenizer("/tmp/Llama-2-7b-hf/tokenizer.model")  # doctest: +SKIP
    """

    def __init__(self, path: str) -> None:
        file = existing_file(path, "tokenizer file")
        self.spm_model = SentencePieceProcessor()
        try:
            self.spm_model.Load(str(file))
        except (OSError, RuntimeError, TypeError) as error:
            message = f"tokenizer file {path} is not a SentencePiece model: download it again."
            raise broken_file(path, "a SentencePiece model", message) from error
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
        """Token ids of ``text``.

        Args:
            text: what is encoded.
            add_bos: put the token of the beginning first.
            add_eos: put the token of the end last.
            trim_leading_whitespace: add no leading space, for a text that continues another: ``prefix`` is encoded
                with it, and its ids are removed.
            prefix: see above; a newline by default.
        """
        check_text(text)
        if trim_leading_whitespace and self.encodes_whitespace:
            prefix = "\n" if prefix is None else prefix
            skipped = len(self.spm_model.encode(prefix, add_bos=add_bos, add_eos=False))
            ids = self.spm_model.encode(prefix + text, add_bos=add_bos, add_eos=add_eos)[skipped:]
            return [self.bos_id, *ids] if add_bos else ids
        return self.spm_model.encode(text, add_bos=add_bos, add_eos=add_eos, out_type=int)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        return self.spm_model.decode(list(ids))
