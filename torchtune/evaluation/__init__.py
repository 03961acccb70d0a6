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
    },
    between_rooms={
        "missing_packages": "_other_readers",
        "read_elsewhere": "_other_readers",
        "tokenize_elsewhere": "_other_readers",
    },
)
