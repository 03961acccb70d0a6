from ._compare_models import Comparison as Comparison
from ._compare_models import compare_layers as compare_layers
from ._compare_models import compare_models as compare_models
from ._compare_models import logits_of as logits_of
from ._eval_rows import EvalRow as EvalRow
from ._eval_rows import EvaluationError as EvaluationError
from ._eval_rows import read_eval_rows as read_eval_rows
from ._labeled_rows import ClassificationReport as ClassificationReport
from ._labeled_rows import Perplexity as Perplexity
from ._labeled_rows import evaluate_classifier as evaluate_classifier
from ._labeled_rows import perplexity as perplexity
from ._retrieval import EmbeddingSettings as EmbeddingSettings
from ._retrieval import Reranker as Reranker
from ._retrieval import RetrievalData as RetrievalData
from ._retrieval import embed as embed
from ._retrieval import evaluate_reranking as evaluate_reranking
from ._retrieval import evaluate_retrieval as evaluate_retrieval
from ._retrieval import read_retrieval as read_retrieval
from ._retrieval import retrieval_scores as retrieval_scores
from ._score_answers import NAMED_SCORES
from ._score_answers import AnswerReport as AnswerReport
from ._score_answers import check_scores as check_scores
from ._score_answers import evaluate_answers as evaluate_answers
from ._score_answers import make_scores as make_scores
from ._tasks import evaluate_tasks as evaluate_tasks
from ._tasks import find_tasks as find_tasks
from ._validation_scores import RETRIEVAL_SCORES, check_score_names
from ._validation_scores import ValidationScores as ValidationScores
