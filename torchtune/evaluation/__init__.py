"""Evaluation of models: scores of answers, perplexity, tasks of lm-eval, and comparisons of two models."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AnswerReport": "_score_answers",
        "Comparison": "_compare_models",
        "EvalRow": "_eval_rows",
        "EvaluationError": "_eval_rows",
        "Perplexity": "_perplexity",
        "check_scores": "_score_answers",
        "compare_layers": "_compare_models",
        "compare_models": "_compare_models",
        "evaluate_answers": "_score_answers",
        "evaluate_tasks": "_tasks",
        "find_tasks": "_tasks",
        "logits_of": "_compare_models",
        "make_scores": "_score_answers",
        "perplexity": "_perplexity",
        "read_eval_rows": "_eval_rows",
    },
    between_rooms={
        "missing_packages": "_reference_logits",
        "read_elsewhere": "_reference_logits",
        "tokenize_elsewhere": "_reference_logits",
    },
)
