from ._checkpoint_client import CheckpointClient as CheckpointClient
from ._checkpoint_client import TrainingProgress as TrainingProgress
from ._checkpoint_files import ADAPTER_CONFIG_FNAME as ADAPTER_CONFIG_FNAME
from ._checkpoint_files import ADAPTER_MODEL_FNAME as ADAPTER_MODEL_FNAME
from ._checkpoint_files import RECIPE_STATE_DIRNAME as RECIPE_STATE_DIRNAME
from ._checkpoint_files import REPO_ID_FNAME as REPO_ID_FNAME
from ._checkpoint_files import SAFETENSOR_INDEX_FNAME as SAFETENSOR_INDEX_FNAME
from ._checkpoint_files import SHARD_FNAME as SHARD_FNAME
from ._checkpoint_files import SUFFIXES_TO_NOT_COPY as SUFFIXES_TO_NOT_COPY
from ._checkpoint_files import TORCH_INDEX_FNAME as TORCH_INDEX_FNAME
from ._checkpoint_files import CheckpointerInterface as CheckpointerInterface
from ._checkpoint_files import check_outdir_not_in_ckptdir as check_outdir_not_in_ckptdir
from ._checkpoint_files import copy_files as copy_files
from ._checkpoint_files import get_adapter_checkpoint_path as get_adapter_checkpoint_path
from ._checkpoint_files import get_model_checkpoint_path as get_model_checkpoint_path
from ._checkpoint_files import get_path as get_path
from ._checkpoint_files import get_recipe_checkpoint_path as get_recipe_checkpoint_path
from ._former_config import TuneRecipeArgumentParser as TuneRecipeArgumentParser
from ._former_datasets import PACK_TYPE as PACK_TYPE
from ._former_models import GemmaRMSNorm as GemmaRMSNorm
from ._former_models import keep_row_losses as keep_row_losses
from ._former_models import load_dora_magnitudes as load_dora_magnitudes
from ._former_models import pad_dim_to_size as pad_dim_to_size
from ._former_models import should_use_grouped_mm as should_use_grouped_mm
from ._former_models import swiglu_mlp as swiglu_mlp
from ._former_models import update_stop_tokens_tracker as update_stop_tokens_tracker
from ._former_models import use_grouped_mm as use_grouped_mm
from ._former_models import validate_state_dict_for_lora as validate_state_dict_for_lora
from ._former_parallel import get_context_parallel_manager as get_context_parallel_manager
from ._former_parallel import get_train_context as get_train_context
from ._former_parallel import get_world_size_and_rank as get_world_size_and_rank
from ._former_parallel import init_distributed as init_distributed
from ._former_parallel import scale_grads as scale_grads
from ._former_parallel import shard_model as shard_model
from ._former_quantization import (
    _disable_linear_fake_quant,
    _enable_linear_fake_quant,
    _get_disable_fake_quant,
    _get_enable_fake_quant,
    disable_4w_fake_quant_module_swap,
    disable_8da4w_fake_quant_module_swap,
    enable_4w_fake_quant_module_swap,
    enable_8da4w_fake_quant_module_swap,
)
from ._former_quantization import is_fp8_tensorwise_scaling as is_fp8_tensorwise_scaling
from ._former_quantization import swap_lora_linear_with_qat as swap_lora_linear_with_qat
from ._optimizer_in_backward import OptimizerInBackwardWrapper as OptimizerInBackwardWrapper
from ._optimizer_in_backward import create_optim_in_bwd_wrapper as create_optim_in_bwd_wrapper
from ._optimizer_in_backward import register_optim_in_bwd_hooks as register_optim_in_bwd_hooks
from ._run_report import RunReport as RunReport
from ._state_dicts import gather_cpu_state_dict as gather_cpu_state_dict
from ._state_dicts import get_full_optimizer_state_dict as get_full_optimizer_state_dict
from ._state_dicts import load_from_full_model_state_dict as load_from_full_model_state_dict
from ._state_dicts import load_from_full_optimizer_state_dict as load_from_full_optimizer_state_dict
