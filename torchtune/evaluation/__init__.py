"""Evaluation of models: scores of answers, perplexity, tasks of lm-eval, and comparisons of two models."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AnswerReport": "_score_answers",
        "Comparison": "_compare_models",
        "EvalRow": "_questions",
        "EvaluationError": "_evaluation_error",
        "Perplexity": "_perplexity",
        "check_scores": "_scores",
        "compare_layers": "_compare_models",
        "compare_models": "_compare_models",
        "evaluate_answers": "_score_answers",
        "evaluate_tasks": "_tasks",
        "find_tasks": "_tasks",
        "logits_of": "_compare_models",
        "make_scores": "_scores",
        "perplexity": "_perplexity",
        "read_eval_rows": "_questions",
        "record_logits": "_compare_models",
    },
    between_rooms={
        "ReadModel": "_other_readers",
        "missing_packages": "_other_readers",
        "read_with_llama_cpp": "_other_readers",
        "read_with_peft": "_other_readers",
        "read_with_transformers": "_other_readers",
    },
)
