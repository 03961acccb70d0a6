"""Sampling text from models."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AnswerFile": "_prompt_file",
        "GeneratedTokens": "_tokens",
        "GenerationError": "_generation_error",
        "LogitsProcessor": "_sampling",
        "Prompt": "_prompt_file",
        "TokenStep": "_tokens",
        "answer_limit": "_answer_prompts",
        "answer_prompts": "_answer_prompts",
        "fast_linears": "_fast_linear",
        "generate": "_generation",
        "generate_next_token": "_generation",
        "generate_tokens": "_tokens",
        "get_causal_mask_from_padding_mask": "_masks",
        "get_position_ids_from_padding_mask": "_masks",
        "images_of_row": "_prompt_images",
        "model_digest": "_answer_prompts",
        "prompt_row": "_answer_prompts",
        "read_prompts": "_prompt_file",
        "sample": "_generation",
        "stream": "_stream_prompt",
        "stream_tokens": "_tokens",
    },
    between_rooms={
        "Batch": "_continuous_batch",
        "BatchServer": "_batch_server",
        "Job": "_batch_server",
        "Request": "_continuous_batch",
        "Sampling": "_sampling",
        "evaluating": "_decode",
        "images_of_batch": "_prompt_images",
        "seeded_draws": "_tokens",
        "to_be_answered": "_prompt_file",
        "uncompiled": "_uncompiled",
    },
)
