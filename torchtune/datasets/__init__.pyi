from . import multimodal as multimodal
from ._bad_rows import num_left_out
from ._classification import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ClassificationTransform,
    class_counts,
    describe_labels,
    describe_names,
    problem_type_of,
)
from ._classification import ClassificationDataset as ClassificationDataset
from ._classification import ClassificationTask as ClassificationTask
from ._classification import classification_dataset as classification_dataset
from ._command_modes import NotRead, Shard, ShardWritten, preparing, preparing_shard, preview
from ._file_formats import is_data_file, numbered_lines, parse_json
from ._file_report import (
    CHECKED_SETTINGS,
    SAMPLE,
    FileFacts,
    histogram,
    read_rows,
    report,
    scan,
    scan_rows,
    shared_rows,
)
from ._fingerprint import Fingerprint
from ._from_config import dataset_nodes as dataset_nodes
from ._from_config import instantiate_collate as instantiate_collate
from ._from_config import instantiate_dataset as instantiate_dataset
from ._from_config import is_mixture as is_mixture
from ._from_config import mixed_dataset as mixed_dataset
from ._from_config import mixture_examples as mixture_examples
from ._mixed import ConcatDataset as ConcatDataset
from ._mixed import MixedDataset as MixedDataset
from ._packed import PackedDataset as PackedDataset
from ._preference import KTODataset as KTODataset
from ._preference import LabelledAnswerToMessages as LabelledAnswerToMessages
from ._preference import PreferenceDataset as PreferenceDataset
from ._preference import hh_rlhf_helpful_dataset as hh_rlhf_helpful_dataset
from ._preference import kto_dataset as kto_dataset
from ._preference import preference_dataset as preference_dataset
from ._preference import stack_exchange_paired_dataset as stack_exchange_paired_dataset
from ._pretokenized import PretokenizedDataset as PretokenizedDataset
from ._pretokenized import pretokenized_dataset as pretokenized_dataset
from ._processes import workers
from ._prompts import PromptDataset as PromptDataset
from ._prompts import prompt_dataset as prompt_dataset
from ._prompts import reasoning_gym_dataset as reasoning_gym_dataset
from ._retrieval import EmbeddingDataset as EmbeddingDataset
from ._retrieval import RerankingDataset as RerankingDataset
from ._retrieval import embedding_dataset as embedding_dataset
from ._retrieval import reranking_dataset as reranking_dataset
from ._row_cache import cache_path
from ._row_formats import (
    INSTRUCTIONS,
    PROMPTS_WITH_ANSWERS,
    RAW_TEXT,
    RowFormat,
    chat_format,
    column_map,
    format_of,
    readings_of,
)
from ._row_images import content_of, size_of
from ._row_source import RowSource as RowSource
from ._row_source import Source as Source
from ._row_source import load_rows, without_waiting_for_the_hub
from ._sft import SFTDataset as SFTDataset
from ._sft import SFTTransform as SFTTransform
from ._sft import alpaca_cleaned_dataset as alpaca_cleaned_dataset
from ._sft import alpaca_dataset as alpaca_dataset
from ._sft import chat_dataset as chat_dataset
from ._sft import grammar_dataset as grammar_dataset
from ._sft import instruct_dataset as instruct_dataset
from ._sft import samsum_dataset as samsum_dataset
from ._sft import slimorca_dataset as slimorca_dataset
from ._shards import merge_shards, write_manifest
from ._shared_rows import count_shared_rows as count_shared_rows
from ._shared_rows import explain_shared_rows as explain_shared_rows
from ._streamed import StreamedDataset as StreamedDataset
from ._text_completion import TextCompletionDataset as TextCompletionDataset
from ._text_completion import cnn_dailymail_articles_dataset as cnn_dailymail_articles_dataset
from ._text_completion import text_completion_dataset as text_completion_dataset
from ._text_completion import wikitext_dataset as wikitext_dataset
