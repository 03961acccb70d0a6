from ._batch import MIN_SHARED, check_shifted, label_index
from ._batch import Batch as Batch
from ._batch import share_prefixes as share_prefixes
from ._collate import collate_documents as collate_documents
from ._collate import collate_embedding as collate_embedding
from ._collate import collate_preference as collate_preference
from ._collate import collate_reranking as collate_reranking
from ._collate import documents_of
from ._collate import left_pad_sequence as left_pad_sequence
from ._collate import padded_collate as padded_collate
from ._collate import padded_collate_dpo as padded_collate_dpo
from ._collate import padded_collate_packed as padded_collate_packed
from ._collate import padded_collate_sft as padded_collate_sft
from ._collate import padded_collate_tiled_images_and_mask as padded_collate_tiled_images_and_mask
from ._dataset import ExampleDataset, WrappedDataset, as_example_dataset, make_random_state
from ._documents import Documents as Documents
from ._documents import SharedPrefixes
from ._images import check_image, each_image, image_size, images_of_columns, open_image, read_pixels, with_images
from ._images import format_content_with_images as format_content_with_images
from ._images import load_image as load_image
from ._loader import BatchLoader as BatchLoader
from ._loader import seeded_generators
from ._messages import (
    REASONING_FIELDS,
    Video,
    check_answers,
    read_row_weight,
    role_of,
    warn_of_row_weight,
    warn_of_similar_columns,
)
from ._messages import MaskingName as MaskingName
from ._messages import MaskingStrategy as MaskingStrategy
from ._messages import Message as Message
from ._messages import MessageLike as MessageLike
from ._messages import Role as Role
from ._messages import as_messages as as_messages
from ._messages import mask_messages as mask_messages
from ._messages import validate_messages as validate_messages
from ._prompt_templates import DEFAULT_PAIR_TEMPLATE, RERANKER_FILE, TemplateType, get_prompt_template, with_tags
from ._prompt_templates import ChatMLTemplate as ChatMLTemplate
from ._prompt_templates import GrammarErrorCorrectionTemplate as GrammarErrorCorrectionTemplate
from ._prompt_templates import PairTemplate as PairTemplate
from ._prompt_templates import PromptTemplate as PromptTemplate
from ._prompt_templates import PromptTemplateInterface as PromptTemplateInterface
from ._prompt_templates import QuestionAnswerTemplate as QuestionAnswerTemplate
from ._prompt_templates import SummarizeTemplate as SummarizeTemplate
from ._ragged_images import (
    Colors,
    Grid,
    ImageCache,
    check_placeholders,
    grid_positions,
    join_images,
    join_pixels,
    token_counts,
)
from ._ragged_images import Images as Images
from ._rows import CROSS_ENTROPY_IGNORE_IDX as CROSS_ENTROPY_IGNORE_IDX
from ._rows import DataError as DataError
from ._rows import SourceNumber, check_column_map, column, copy_sample, kind_of, text_column, truncate_row
from ._rows import Transform as Transform
from ._rows import truncate as truncate
from ._to_messages import AlpacaToMessages as AlpacaToMessages
from ._to_messages import ChosenRejectedToMessages as ChosenRejectedToMessages
from ._to_messages import (
    Conversation,
    answer_turns,
    image_column,
    read_conversation,
    reference_answer,
    resolve_masking,
    tools_entry,
    turns_of_column,
    turns_with_answer,
    unfold_prompt,
)
from ._to_messages import InputOutputToMessages as InputOutputToMessages
from ._to_messages import OpenAIToMessages as OpenAIToMessages
from ._to_messages import ShareGPTToMessages as ShareGPTToMessages
from ._tool_calls import canonical_calls, parse_json_text, read_tool_calls, read_tools
