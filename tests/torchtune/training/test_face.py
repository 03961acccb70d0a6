"""The face of the package: light to import, complete."""

import subprocess
import sys

import pytest

from torchtune import training

PROMISED = (
    "DEFAULT_PROFILE_DIR DEFAULT_PROFILER_ACTIVITIES DEFAULT_SCHEDULE DEFAULT_TRACE_OPTS DummyProfiler NoOpManager "
    "OffloadActivations OptimizerInBackwardWrapper PROFILER_KEY VALID_BACKENDS_FOR_MEMORY_STATS "
    "apply_selective_activation_checkpointing cleanup_before_training compile_loss compile_model "
    "create_optim_in_bwd_wrapper disable_dropout get_act_offloading_ctx_manager get_cosine_schedule_with_warmup "
    "get_distributed_backend get_dtype get_lr get_memory_stats get_unmasked_sequence_lengths is_distributed "
    "log_memory_stats register_optim_in_bwd_hooks scale_grads_ set_activation_checkpointing set_default_dtype set_seed "
    "set_torch_num_threads setup_torch_profiler validate_expected_param_dtype validate_no_params_on_meta_device "
    "ADAPTER_CONFIG ADAPTER_KEY DATALOADER_KEY EPOCHS_KEY MAX_STEPS_KEY MODEL_KEY OPT_KEY RNG_KEY SEED_KEY STEPS_KEY "
    "TOTAL_EPOCHS_KEY VAL_DATALOADER_KEY Checkpointer FormattedCheckpointFiles FullModelHFCheckpointer "
    "FullModelMetaCheckpointer FullModelTorchTuneCheckpointer ModelType"
).split()


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names(name):
    assert name in training.__all__
    assert getattr(training, name) is not None


def test_every_name_of_the_face_exists():
    assert all(hasattr(training, name) for name in training.__all__)
    assert len(set(training.__all__)) == len(training.__all__)


def test_old_module_paths():
    from torchtune.training.activations import apply_selective_activation_checkpointing, checkpoint_wrapper
    from torchtune.training.compat._optimizer_in_backward import OptimizerInBackwardWrapper
    from torchtune.training.lr_schedulers import get_lr
    from torchtune.training.memory import OptimizerInBackwardWrapper as FromMemory
    from torchtune.training.pooling import get_unmasked_sequence_lengths

    assert FromMemory is OptimizerInBackwardWrapper
    assert all([apply_selective_activation_checkpointing, checkpoint_wrapper, get_lr, get_unmasked_sequence_lengths])


def test_recipe_interfaces():
    from torchtune.recipe_interfaces import EvalRecipeInterface, FTRecipeInterface, OrchestrationRecipeInterface

    class Recipe:
        def load_checkpoint(self, **kwargs): ...
        def setup(self, **kwargs): ...
        def train(self, **kwargs): ...
        def save_checkpoint(self, **kwargs): ...
        def cleanup(self, **kwargs): ...

    recipe: FTRecipeInterface = Recipe()
    assert hasattr(EvalRecipeInterface, "evaluate")
    assert hasattr(OrchestrationRecipeInterface, "run")
    assert recipe is not None


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import torchtune.training", ["torch", "numpy", "omegaconf"]),
        ("from torchtune.training import ProgressBar, StopSignal, Throughput", ["torch", "pandas"]),
        (
            "from torchtune.training import prepare_optimizer, get_dtype, set_seed",
            ["torchao", "matplotlib", "datasets"],
        ),
        ("from torchtune.training import set_activation_checkpointing, compile_model", ["torchao", "torch._inductor"]),
    ],
)
def test_names_load_no_more_than_they_need(statement, absent):
    script = f"import sys\n{statement}\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"
