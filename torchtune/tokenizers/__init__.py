"""Tokenizers for text and conversations; each imports its backend library only when it is used."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BaseTokenizer": "_protocols",
        "GPT2BaseTokenizer": "_gpt2",
        "HuggingFaceBaseTokenizer": "_hf_tokenizer",
        "HuggingFaceModelTokenizer": "_hf_model_tokenizer",
        "ModelTokenizer": "_protocols",
        "RecipeTokenizer": "_protocols",
        "SavableTokenizer": "_protocols",
        "SentencePieceBaseTokenizer": "_sentencepiece",
        "StreamDecoder": "_stream_decoder",
        "TekkenTokenizer": "_tekken",
        "TikTokenBaseTokenizer": "_tiktoken",
        "go_template": "_go_template",
        "hf_tokenizer": "_hf_model_tokenizer",
        "parse_hf_tokenizer_json": "_tokenizer_files",
        "tokenize_messages_no_special_tokens": "_plain_layout",
    },
    between_rooms={
        "ByteLevelBPE": "_byte_level_bpe",
        "CL100K_PATTERN": "_patterns",
        "ChatMLTurns": "_chatml_turns",
        "HeaderTurns": "_header_turns",
        "IM_END": "_chatml_turns",
        "IM_START": "_chatml_turns",
        "InstTurnsTokenizer": "_inst_turns",
        "MISSING_TOKENIZER": "_tokenizer_files",
        "MarkedTurnsTokenizer": "_marked_turns",
        "PublishedFiles": "_tokenizer_files",
        "SentencePieceChatTokenizer": "_sentencepiece_chat",
        "arrays_of": "_protocols",
        "end_of_turn_ids": "_protocols",
        "is_tokenizer_file": "_tokenizer_files",
        "required_ids": "_marked_turns",
        "text_only": "_protocols",
        "tool_options": "_protocols",
    },
)
