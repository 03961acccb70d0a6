"""Named datasets, local files, packed and mixed."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ConcatDataset": "_concat",
        "KTODataset": "_kto",
        "MixedDataset": "_mixed",
        "LabelledAnswerToMessages": "_kto",
        "PackedDataset": "_packed",
        "PreferenceDataset": "_preference",
        "PromptDataset": "_prompts",
        "SFTDataset": "_sft",
        "SFTTransform": "_sft",
        "StreamedDataset": "_stream",
        "TextCompletionDataset": "_text_completion",
        "alpaca_cleaned_dataset": "_instruct",
        "alpaca_dataset": "_instruct",
        "chat_dataset": "_chat",
        "cnn_dailymail_articles_dataset": "_text_completion",
        "grammar_dataset": "_instruct",
        "hh_rlhf_helpful_dataset": "_preference",
        "instantiate_collate": "_instantiate",
        "instantiate_dataset": "_instantiate",
        "instruct_dataset": "_instruct",
        "kto_dataset": "_kto",
        "mixed_dataset": "_mixed",
        "preference_dataset": "_preference",
        "prompt_dataset": "_prompts",
        "reasoning_gym_dataset": "_reasoning_gym",
        "samsum_dataset": "_instruct",
        "slimorca_dataset": "_chat",
        "stack_exchange_paired_dataset": "_preference",
        "text_completion_dataset": "_text_completion",
        "wikitext_dataset": "_text_completion",
    },
)
