"""Evaluation of models: scores of answers to rows, perplexity of a dataset, and tasks of lm-eval."""

from torchtune.evaluation._evaluation_error import EvaluationError
from torchtune.evaluation._perplexity import Perplexity, perplexity
from torchtune.evaluation._questions import EvalRow, read_eval_rows
from torchtune.evaluation._score_answers import AnswerReport, evaluate_answers
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
