"""What a model is worth: scores of its answers to rows, and its perplexity on data."""

from torchtune.evaluation._answers import AnswerReport, evaluate_answers
from torchtune.evaluation._errors import EvaluationError
from torchtune.evaluation._perplexity import Perplexity, perplexity
from torchtune.evaluation._rows import EvalRow, read_eval_rows
from torchtune.evaluation._scores import check_scores, make_scores

__all__ = [
    "AnswerReport",
    "EvalRow",
    "EvaluationError",
    "Perplexity",
    "check_scores",
    "evaluate_answers",
    "make_scores",
    "perplexity",
    "read_eval_rows",
]
