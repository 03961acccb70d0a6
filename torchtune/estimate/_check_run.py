"""Check that a run can start, before anything is loaded."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from torchtune import config
from torchtune._recipe_registry import current_name, promises, recipe_at
from torchtune.checkpoints import add_reference, check_quantizer, check_savable_tokenizer, checkpoint_contents
from torchtune.config import locate
from torchtune.datasets import NotRead, instantiate_collate, instantiate_dataset, preview
from torchtune.estimate._plan import arrange, build_on_meta, is_mixture, nodes_of
from torchtune.estimate._plan_data import mixture_examples
from torchtune.modules import text_decoder
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.peft import has_adapters, require_adapters
from torchtune.training import SettingsView, fit_vocabulary, is_distributed, is_restart
from torchtune.training.metric_logging import TrackingLogger
from torchtune.training.optim import GroupedOptimizer, require_trained
from torchtune.training.parallel import ParallelDims, check_parallelizable
from torchtune.training.precision import get_dtype
from torchtune.utils import UserError, find_device, is_simulated


class RunError(UserError):
    """Raised if a run cannot start; the message lists all known reasons."""

    raised_on_all = True

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "for 1 reason" if len(problems) == 1 else f"for {len(problems)} reasons"
        super().__init__("\n  ".join([f"the run cannot start, {count}:", *problems]))


def check_run(cfg: Any, processes: int | None = None) -> None:
    """Check in about a second, before data is tokenized, that a run can start.

    The check covers the device, the output folder, the parallel dimensions, names and shapes in the checkpoint, data
    files, and the packages of optimizer and logger. Nothing is loaded or written.

    Args:
        cfg: settings of a recipe; see ``SettingsView`` for the names.
        processes: number of processes; by default torchrun's.

    Raises:
        RunError: the run cannot start; lists all reasons.
        RecipeSettingsError: a name that the library reads is missing, or its value has the wrong type.
    """
    if is_simulated():
        return
    if processes is None:
        processes = int(os.environ["WORLD_SIZE"]) if is_distributed() else 1
    problems = find_problems(cfg, processes)
    if problems:
        raise RunError(problems)


def find_problems(settings: Any, processes: int = 1, *, thorough: bool = False) -> list[str]:
    """Return the reasons why a run cannot start, one sentence each.

    Args:
        settings: see :func:`check_run`.
        processes: number of processes.
        thorough: also run checks that the run repeats before it tokenizes: build the tokenizer and compare it with the
            embedding, and compare the settings with the settings in the checkpoint to resume.
    """
    cfg, problems = SettingsView.of(settings), []

    def attempt(check: Callable[[], Any]) -> Any:
        """Return the result of ``check``; record a user error as a problem and return None."""
        try:
            return check()
        except UserError as error:
            if str(error) not in problems:
                problems.append(str(error))
        return None

    def has(*names: str) -> bool:
        return all(name in cfg.declared and getattr(cfg, name) is not None for name in names)

    device = attempt(lambda: find_device(cfg.device)) if "device" in cfg.declared else None
    if device is not None and has("dtype"):
        attempt(lambda: get_dtype(cfg.dtype, device=device))
    checkpointer = attempt(lambda: config.instantiate(cfg.checkpointer)) if has("checkpointer") else None
    others = {name: attempt(lambda at=at: config.instantiate(at)) for name, (at, _) in cfg.other_models().items() if at}
    for name, source in others.items() if hasattr(checkpointer, "add_source") else ():
        if source is not None:
            attempt(lambda name=name, source=source: checkpointer.add_source(name, source))
    named = None
    compares = "ref_checkpointer" in cfg.declared and "reference" not in others
    if compares and has("loss") and hasattr(checkpointer, "add_source"):
        named = attempt(lambda: add_reference(checkpointer, cfg.ref_checkpointer, cfg.loss) or True)
    resume = cfg.resume_from_checkpoint or is_restart()
    if has("output_dir", "optimizer") and hasattr(checkpointer, "check_output_dir"):
        attempt(lambda: checkpointer.check_output_dir(resume=resume))
    if thorough and resume and hasattr(checkpointer, "check_resume"):
        attempt(lambda: checkpointer.check_resume(cfg.source))
    dims = attempt(lambda: arrange(cfg, processes))
    model = attempt(lambda: build_on_meta(cfg)[0]) if has("model") else None
    if model is not None and has("quantizer") and (has("optimizer") or checkpointer is not None):
        source = None if has("optimizer") else attempt(lambda: checkpointer.store.source())
        attempt(lambda: check_quantizer(config.instantiate(cfg.quantizer), model, source))
    if model is not None:
        attempt(lambda: _check_parts(cfg, model))
        attempt(lambda: check_parallelizable(model, dims or ParallelDims(), _plan(cfg)))
    if model is not None and hasattr(checkpointer, "check_model"):
        attempt(lambda: checkpointer.check_model(model))
    if model is not None and named and has("ref_checkpointer") and hasattr(checkpointer, "check_model"):
        attempt(lambda: checkpointer.check_model(model, name="reference"))
    for name, (_, other) in cfg.other_models().items():
        if hasattr(others.get(name), "check_model"):
            second = attempt(lambda other=other: build_on_meta(other)[0])
            if second is not None:
                attempt(lambda second=second: check_parallelizable(second, dims or ParallelDims(), _plan(cfg)))
                attempt(lambda name=name, second=second: others[name].check_model(second))
    if model is not None and has("optimizer"):
        attempt(lambda: _check_trained(cfg, model, checkpointer))
    built = attempt(lambda: config.instantiate(cfg.tokenizer)) if thorough and has("tokenizer") else None
    if built is not None and model is not None and not cfg.resize_token_embeddings:
        attempt(lambda: fit_vocabulary(model, built))
    if built is not None and has("optimizer", "checkpointer"):
        check_savable_tokenizer(built)
    if has("optimizer"):
        attempt(lambda: _check_optimizer(cfg, device, model))
    for name in ("loss", "metric_logger"):
        if has(name):
            attempt(lambda name=name: _check_component(getattr(cfg, name), build=name == "loss"))
    if has("collate_fn"):
        attempt(lambda: instantiate_collate(cfg.collate_fn, built))
    for name in ("dataset", "dataset_val"):
        if has(name):
            attempt(lambda name=name: _check_sources(getattr(cfg, name)))
    return problems


# A recipe with one of these settings trains on images only if the model represents images by tokens in the text.
_TEXT_SETTINGS = ("ref_checkpointer", "sampler", "teacher_model")


def _check_parts(cfg: SettingsView, model: torch.nn.Module) -> None:
    """Raise if a model with images is trained by a recipe for text."""
    settings = ["ref_policy_checkpointer", *([] if isinstance(model, ImageTextModel) else _TEXT_SETTINGS)]
    if text_decoder(model) is not model and any(name in cfg.declared for name in settings):
        raise UserError(
            f"model: a {type(model).__name__} reads images, and this recipe trains on text only: use a full_finetune "
            "or lora_finetune recipe, or a text model."
        )


def _check_trained(cfg: SettingsView, model: torch.nn.Module, checkpointer: Any) -> None:
    """Check that there are trained parameters and that the recipe saves all of them.

    Custom recipes may save other parameters, so they are checked only if they have ``save_adapter_weights_only``.
    """
    saves_adapters = "save_adapter_weights_only" in cfg.declared
    file = getattr(sys.modules.get(type(cfg.source).__module__), "__file__", None)
    own = None if file is None else recipe_at(file)
    if "weights" in promises(cfg.recipe) and has_adapters(model):
        raise UserError(
            f"model: it has adapters, but {cfg.recipe} trains all weights: use a builder without adapters, or the "
            f"recipe {current_name(cfg.recipe)}, which trains adapters if the model has them."
        )
    if "adapters" in promises(cfg.recipe) | promises(own):
        require_adapters(model)
    elif own is None and not saves_adapters:
        return
    else:
        require_trained(model)
    if hasattr(checkpointer, "check_contents"):
        merge = saves_adapters and not cfg.save_adapter_weights_only
        contents = checkpoint_contents(model, merge=merge) if saves_adapters else "model"
        checkpointer.check_contents(model, contents=contents)


def _check_optimizer(cfg: SettingsView, device: torch.device | None, model: torch.nn.Module | None) -> None:
    """Reject optimizers that cannot be built, or that the device or the recipe's loop does not support."""
    path = str(cfg.optimizer["_component_"])
    offloads = path.endswith(".CPUOffloadOptimizer")
    if path.startswith("schedulefree."):
        raise UserError(
            f"optimizer: {path} has a train and an eval mode, which recipes do not switch: use torch.optim.AdamW with "
            "an lr_scheduler."
        )
    if (offloads or path.startswith("bitsandbytes.")) and device is not None and device.type != "cuda":
        raise UserError(f"optimizer: {path} needs device=cuda, not {device.type}: use torchao.optim.AdamW8bit.")
    if offloads and (
        cfg.optimizer_in_bwd or (cfg.resolved_dtype() != "fp32" and cfg.optimizer_precision != "param_dtype")
    ):
        raise UserError(
            f"optimizer: {path} updates copies of the parameters: set optimizer_precision=param_dtype and "
            "optimizer_in_bwd=False."
        )
    trained = [] if model is None else [item for item in model.named_parameters() if item[1].requires_grad]
    for name, parameter in trained if path == "torch.optim.Muon" else ():
        if parameter.dim() != 2:
            raise UserError(
                f"optimizer: {path} only updates matrices, but {name} has {parameter.dim()} dimensions: use "
                "torchtune.training.MuonWithAdamW."
            )
    if offloads or path.startswith("bitsandbytes."):  # cannot be built without CUDA
        locate(path)
        return
    matrix = torch.nn.Parameter(torch.zeros(8, 8))
    made = config.instantiate(cfg.optimizer, [matrix])
    if isinstance(made, GroupedOptimizer) and model is not None:
        made.assign(trained, model, quiet=True)
        for members in made.members(parameter for _, parameter in trained).values():
            made.adopt(matrix, members[0])
            made.make([matrix])


def _plan(cfg: SettingsView) -> Callable[[torch.nn.Module], Any] | None:
    """Return the tensor-parallel plan of the config, if it has one."""
    node = cfg.tensor_parallel_plan
    return None if node is None else lambda model: config.instantiate(node, model)


def _check_component(node: Any, *, build: bool) -> None:
    """Build a component; with ``build=False``, because building has side effects, check its packages and methods."""
    if build:
        config.instantiate(node)
        return
    target = locate(node["_component_"])
    needed = [name for name in ("log", "log_dict", "log_config", "close") if not callable(getattr(target, name, None))]
    if isinstance(target, type) and needed:
        raise UserError(f"metric_logger: {node['_component_']} has no method {needed[0]}: recipes call it.")
    if isinstance(target, type) and issubclass(target, TrackingLogger):
        target.check_ready(node)


def _check_sources(dataset: Any) -> None:
    """Check that the files of built-in datasets exist; other datasets are not built."""
    if is_mixture(dataset):
        mixture_examples(dataset, [1] * len(dataset["datasets"]))
    for node in nodes_of(dataset):
        if str(node.get("_component_")).startswith("torchtune.datasets."):
            with preview(0), suppress(NotRead):
                instantiate_dataset(node, _NoTokenizer())


class _NoTokenizer:
    """Placeholder for the tokenizer, which checks of file names do not use."""

    def __call__(self, sample: Any, inference: bool = False) -> Any:
        """Raise: no row is read."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> None:
        return None if not name.startswith("__") else object.__getattribute__(self, name)

    max_seq_len = 1
