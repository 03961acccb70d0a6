"""What a model is worth: scores of its answers to rows, its perplexity on data, tasks of the evaluation harness."""

from torchtune.evaluation._answers import AnswerReport, evaluate_answers
from torchtune.evaluation._errors import EvaluationError
from torchtune.evaluation._perplexity import Perplexity, perplexity
from torchtune.evaluation._rows import EvalRow, read_eval_rows
from torchtune.evaluation._scores import check_scores, make_scores
from torchtune.evaluation._tasks import evaluate_tasks, find_tasks

__all__ = [
    "AnswerReport",
    "EvalRow",
    "EvaluationError",
    "Perplexity",
    "check_scores",
    "evaluate_answers",
    "evaluate_tasks",
    "find_tasks",
    "make_scores",
    "perplexity",
    "read_eval_rows",
]
