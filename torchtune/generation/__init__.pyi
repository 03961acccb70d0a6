from ._answer_prompts import AnswerFile as AnswerFile
from ._answer_prompts import answer_prompts as answer_prompts
from ._answer_prompts import model_digest as model_digest
from ._answer_prompts import stream_answers, tokenize_prompt
from ._batch_server import BatchServer, Job, follow_batches
from ._continuous_batch import Batch, Request, evaluating
from ._continuous_batch import check_generates as check_generates
from ._fast_linear import fast_linears as fast_linears
from ._fast_linear import uncompiled
from ._generate import GeneratedTokens as GeneratedTokens
from ._generate import TokenStep as TokenStep
from ._generate import generate as generate
from ._generate import generate_next_token as generate_next_token
from ._generate import generate_tokens as generate_tokens
from ._generate import get_causal_mask_from_padding_mask as get_causal_mask_from_padding_mask
from ._generate import get_position_ids_from_padding_mask as get_position_ids_from_padding_mask
from ._generate import stream as stream
from ._generate import stream_tokens as stream_tokens
from ._json_filter import JSONFilter, TokenDecoder, TokenTexts
from ._json_filter import JSONGrammar as JSONGrammar
from ._prompts import Prompt as Prompt
from ._prompts import answer_limit as answer_limit
from ._prompts import images_of_batch, prompt_turns
from ._prompts import images_of_row as images_of_row
from ._prompts import prompt_row as prompt_row
from ._prompts import read_prompts as read_prompts
from ._sampling import GenerationError as GenerationError
from ._sampling import LogitsProcessor as LogitsProcessor
from ._sampling import Sampling as Sampling
from ._sampling import sample as sample
from ._sampling import seeded_draws
