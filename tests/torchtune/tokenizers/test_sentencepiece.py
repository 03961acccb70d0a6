"""SentencePiece texts with control tokens in them."""

from typing import ClassVar

from tests.torchtune.models.tokenizer_files import write_sentencepiece
from torchtune.tokenizers import SentencePieceChatTokenizer


class MarkedTokenizer(SentencePieceChatTokenizer):
    control_texts: ClassVar[tuple[str, ...]] = ("<turn>",)


def test_control_text_in_a_document_is_encoded_as_text_without_more_spaces(tmp_path):
    path = write_sentencepiece(tmp_path / "marked.model", user_defined_symbols=["<turn>"])
    tokenizer = MarkedTokenizer(path)
    text = "red<turn>blue"
    control_id = tokenizer.encode("<turn>", add_bos=False, add_eos=False)[-1]
    assert control_id in tokenizer.encode(text)
    ids = tokenizer.encode_text(text)
    assert control_id not in ids
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert ids.count(tokenizer.bos_id) == ids.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(ids) == text
