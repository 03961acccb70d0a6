from ._byte_pair_encoding import CL100K_PATTERN, ByteLevelBPE
from ._byte_pair_encoding import GPT2BaseTokenizer as GPT2BaseTokenizer
from ._byte_pair_encoding import TekkenTokenizer as TekkenTokenizer
from ._byte_pair_encoding import TikTokenBaseTokenizer as TikTokenBaseTokenizer
from ._chat_layouts import MarkedTurnsTokenizer as MarkedTurnsTokenizer
from ._chat_layouts import required_ids
from ._chat_layouts import tokenize_messages_no_special_tokens as tokenize_messages_no_special_tokens
from ._chat_template import go_template as go_template
from ._decoding import StreamDecoder as StreamDecoder
from ._decoding import decode_pieces, document_texts, is_trained
from ._family_layouts import IM_END, IM_START, ChatMLTurns, HeaderTurns, InstTurnsTokenizer
from ._files import MISSING_TOKENIZER, explain_unknown_tokens, is_tokenizer_file, missing_new_tokens
from ._files import PublishedFiles as PublishedFiles
from ._files import parse_hf_tokenizer_json as parse_hf_tokenizer_json
from ._hf_tokenizer import HuggingFaceBaseTokenizer as HuggingFaceBaseTokenizer
from ._hf_tokenizer import HuggingFaceModelTokenizer as HuggingFaceModelTokenizer
from ._hf_tokenizer import hf_tokenizer as hf_tokenizer
from ._protocols import BaseTokenizer as BaseTokenizer
from ._protocols import ModelTokenizer as ModelTokenizer
from ._protocols import RecipeTokenizer as RecipeTokenizer
from ._protocols import SavableTokenizer as SavableTokenizer
from ._protocols import arrays_of, chat_template_text, check_tokenizer, end_of_text, text_only, tool_options
from ._sentencepiece import SentencePieceBaseTokenizer as SentencePieceBaseTokenizer
from ._sentencepiece import SentencePieceChatTokenizer
