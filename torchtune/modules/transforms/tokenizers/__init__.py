"""From text and messages to token ids and back; each library is loaded by the tokenizer that needs it."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BaseTokenizer": "_protocols",
        "GPT2BaseTokenizer": "_gpt2",
        "HuggingFaceBaseTokenizer": "_hf_tokenizer",
        "HuggingFaceModelTokenizer": "_hf_model_tokenizer",
        "ModelTokenizer": "_protocols",
        "SentencePieceBaseTokenizer": "_sentencepiece",
        "StreamDecoder": "_stream",
        "TekkenTokenizer": "_tekken",
        "TikTokenBaseTokenizer": "_tiktoken",
        "hf_tokenizer": "_hf_model_tokenizer",
        "parse_hf_tokenizer_json": "_files",
        "tokenize_messages_no_special_tokens": "_messages",
    },
)
