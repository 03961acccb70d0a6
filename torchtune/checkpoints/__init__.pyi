from ._adapter import ADAPTER_FILE, adapter_conversion, adapter_folder, num_classes_of_adapter
from ._adapter import adapted_copy as adapted_copy
from ._adapter import base_of_adapter as base_of_adapter
from ._adapter import has_adapter as has_adapter
from ._adapter import has_conversion_files as has_conversion_files
from ._adapter_settings import ADAPTER_CONFIG_FILE
from ._checkpoint_store import CheckpointStore as CheckpointStore
from ._checkpointers import Checkpointer as Checkpointer
from ._checkpointers import FullModelHFCheckpointer as FullModelHFCheckpointer
from ._checkpointers import FullModelMetaCheckpointer as FullModelMetaCheckpointer
from ._checkpointers import FullModelTorchTuneCheckpointer as FullModelTorchTuneCheckpointer
from ._checkpointers import ModuleCheckpointer as ModuleCheckpointer
from ._directories import BEST, MARKER, best_checkpoint, best_record, complete_directories, newest_record
from ._directories import checkpoints_in as checkpoints_in
from ._directories import verify_checkpoint as verify_checkpoint
from ._export import Contents
from ._export import checkpoint_contents as checkpoint_contents
from ._full_state_dicts import ADAPTER_CONFIG as ADAPTER_CONFIG
from ._full_state_dicts import ADAPTER_KEY as ADAPTER_KEY
from ._full_state_dicts import DATALOADER_KEY as DATALOADER_KEY
from ._full_state_dicts import EPOCHS_KEY as EPOCHS_KEY
from ._full_state_dicts import MAX_STEPS_KEY as MAX_STEPS_KEY
from ._full_state_dicts import MODEL_KEY as MODEL_KEY
from ._full_state_dicts import OPT_KEY as OPT_KEY
from ._full_state_dicts import RNG_KEY as RNG_KEY
from ._full_state_dicts import SEED_KEY as SEED_KEY
from ._full_state_dicts import STEPS_KEY as STEPS_KEY
from ._full_state_dicts import TOTAL_EPOCHS_KEY as TOTAL_EPOCHS_KEY
from ._full_state_dicts import VAL_DATALOADER_KEY as VAL_DATALOADER_KEY
from ._full_state_dicts import get_largest_iter_folder as get_largest_iter_folder
from ._full_state_dicts import update_state_dict_for_classifier as update_state_dict_for_classifier
from ._gguf import GGUFFile as GGUFFile
from ._load import ModelSource as ModelSource
from ._load import ModelType as ModelType
from ._load import StreamedSource
from ._model_weights import ModelWeights, materialize
from ._quantize import check_quantizer as check_quantizer
from ._quantize import gguf_to_hf as gguf_to_hf
from ._quantize import quantize_checkpoint as quantize_checkpoint
from ._resume import ResumePoint as ResumePoint
from ._resume import add_reference as add_reference
from ._small_files import check_savable_tokenizer
from ._state import check_training_state as check_training_state
from ._weight_files import CheckpointError as CheckpointError
from ._weight_files import FormattedCheckpointFiles as FormattedCheckpointFiles
from ._weight_files import safe_torch_load as safe_torch_load
