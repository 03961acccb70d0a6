"""Check that a run can start, before anything is loaded: its settings together, devices, checkpoints, models, data."""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchtune import config, evaluation
from torchtune._recipe_registry import current_name, promises, recipe_at
from torchtune.checkpoints import add_reference, check_quantizer, check_savable_tokenizer, checkpoint_contents
from torchtune.config import SettingsView, as_written, did_you_mean, locate
from torchtune.datasets import (
    NotRead,
    dataset_nodes,
    instantiate_collate,
    instantiate_dataset,
    is_mixture,
    mixture_examples,
    preview,
)
from torchtune.estimate._plan import arrange, build_on_meta, other_models, weight_dtype
from torchtune.modules import text_decoder
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.peft import has_adapters, require_adapters
from torchtune.supervision import BestValidation
from torchtune.tokenizers import explain_unknown_tokens
from torchtune.training import GroupedOptimizer, add_token_rows, fit_vocabulary, is_distributed, is_restart
from torchtune.training.metric_logging import TrackingLogger
from torchtune.training.optim import require_trained
from torchtune.training.parallel import ParallelDims, check_parallelizable
from torchtune.training.precision import get_dtype
from torchtune.utils import UserError, find_device, is_simulated, parse_device


class RunError(UserError):
    """Raised if a run cannot start; the message lists all known reasons."""

    raised_on_all = True

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        reasons = "1 reason" if len(problems) == 1 else f"{len(problems)} reasons"
        super().__init__("\n  ".join([f"the run cannot start, for {reasons}:", *problems]))


def check_run(cfg: Any, processes: int | None = None) -> None:
    """Check in about a second, before data is tokenized, that a run can start.

    The check covers the device, the output folder, the parallel dimensions, names and shapes in the checkpoint, data
    files, and the packages of optimizer and logger. Nothing is loaded, and no file is left behind.

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
        processes = 1
        if is_distributed():
            processes = int(os.environ["WORLD_SIZE"])
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

    Example:
        >>> torchtune.estimate.find_problems({"loss": {"_component_": "torch.nn.NLLoss"}})
        ["'torch.nn.NLLoss': module 'torch.nn' has no attribute 'NLLoss'; did you mean 'NLLLoss'?"]
    """
    check = _RunCheck(SettingsView.of(settings), processes, thorough=thorough)
    check.check_device()
    check.check_checkpoints()
    check.check_models()
    check.check_tokenizer()
    check.check_components()
    return check.problems


class _RunCheck:
    """Checks of a run, in the order in which the run does these things; each problem is recorded, and ends no check.

    Args:
        cfg: settings of the run.
        processes: number of processes.
        thorough: see :func:`find_problems`.

    Attributes:
        problems: the reasons why the run cannot start.
    """

    def __init__(self, cfg: SettingsView, processes: int, *, thorough: bool) -> None:
        self.problems: list[str] = []
        self._cfg = cfg
        self._processes = processes
        self._thorough = thorough
        # What the checks have built so far; None or absent if the recipe lacks it, or it cannot be built.
        self._device: torch.device | None = None
        self._checkpointer: Any = None
        self._sources: dict[str, Any] = {}  # checkpoints of other models, by name
        self._has_reference = False  # whether the checkpointer has that of the loss's reference model
        self._model: torch.nn.Module | None = None
        self._dims = ParallelDims()
        self._tokenizer: Any = None

    def _attempt(self, check: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``check``; record a user error as a problem and return None."""
        try:
            return check(*args, **kwargs)
        except UserError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
        return None

    def _has(self, *names: str) -> bool:
        """Return whether the recipe has these settings, and the config gives them values."""
        return all(name in self._cfg.declared and getattr(self._cfg, name) is not None for name in names)

    def check_device(self) -> None:
        """Find the device, and check that it has the dtype."""
        if "device" in self._cfg.declared:
            self._device = self._attempt(lambda: find_device(self._cfg.device))
        if self._device is not None and self._has("dtype"):
            self._attempt(get_dtype, self._cfg.dtype, device=self._device)

    def check_checkpoints(self) -> None:
        """Check the checkpoints of all models, the output folder, and the checkpoint to resume."""
        cfg = self._cfg
        if self._has("checkpointer"):
            self._checkpointer = self._attempt(config.instantiate, cfg.checkpointer)
        for name, (node, _) in other_models(cfg).items():
            if node:
                self._sources[name] = self._attempt(config.instantiate, node)
        # hasattr is False for None, and for a checkpointer of the user's own that lacks the method.
        if hasattr(self._checkpointer, "add_source"):
            for name, source in self._sources.items():
                if source is not None:
                    self._attempt(self._checkpointer.add_source, name, source)
        # A reference model with a setting of its own is among the sources; others have the trained model's layers.
        needs_reference = "ref_checkpointer" in cfg.declared and "reference" not in self._sources
        if needs_reference and self._has("loss") and hasattr(self._checkpointer, "add_source"):
            self._attempt(self._add_reference)
        resume = cfg.resume_from_checkpoint or is_restart()  # torchrun's restarts resume without the setting
        # Only recipes that train write checkpoints of the checkpointer into the folder.
        if self._has("output_dir", "optimizer") and hasattr(self._checkpointer, "check_output_dir"):
            self._attempt(self._checkpointer.check_output_dir, resume=resume)
        if self._thorough and resume and hasattr(self._checkpointer, "check_resume"):
            self._attempt(self._checkpointer.check_resume, cfg.source)

    def _add_reference(self) -> None:
        """Add the checkpoint of the loss's reference model, which has the architecture of the trained model."""
        add_reference(self._checkpointer, self._cfg.ref_checkpointer, self._cfg.loss)
        self._has_reference = True

    def check_models(self) -> None:
        """Check on the meta device how models are distributed, and whether the checkpoints have their weights."""
        cfg = self._cfg
        # After a problem with the mesh, the models are checked as on one device.
        self._dims = self._attempt(arrange, cfg, self._processes) or ParallelDims()
        if self._has("model"):
            self._model = self._attempt(_build_model, cfg)
        if self._model is not None:
            if self._has("quantizer") and (self._has("optimizer") or self._checkpointer is not None):
                # A recipe that trains simulates the format. Others quantize a checkpoint, which must not be quantized.
                source = None
                if not self._has("optimizer"):
                    source = self._attempt(self._checkpointer.source)
                self._attempt(lambda: check_quantizer(config.instantiate(cfg.quantizer), self._model, source))
            self._attempt(_check_images, cfg, self._model)
            if not cfg.resize_token_embeddings:  # else the number of rows to divide is known with the tokenizer
                self._attempt(_check_parallel, cfg, self._model, self._dims)
            if hasattr(self._checkpointer, "check_model"):
                self._attempt(self._checkpointer.check_model, self._model)
                if self._has_reference and self._has("ref_checkpointer"):
                    self._attempt(self._checkpointer.check_model, self._model, name="reference")
        for name, (_, view) in other_models(cfg).items():
            source = self._sources.get(name)
            if hasattr(source, "check_model"):
                other_model = self._attempt(_build_model, view)
                if other_model is not None:
                    self._attempt(_check_parallel, cfg, other_model, self._dims)
                    self._attempt(source.check_model, other_model)
        if self._model is not None and self._has("optimizer"):
            self._attempt(_check_trained, cfg, self._model, self._checkpointer)

    def check_tokenizer(self) -> None:
        """Check that the models know the tokenizer's ids; the model may get rows of new tokens."""
        if self._thorough and self._has("tokenizer"):
            self._tokenizer = self._attempt(config.instantiate, self._cfg.tokenizer)
        if self._tokenizer is None:
            return
        if self._model is not None and self._cfg.resize_token_embeddings:
            self._attempt(add_token_rows, self._model, self._tokenizer)
            self._attempt(_check_parallel, self._cfg, self._model, self._dims)  # with the rows of new tokens
        elif self._model is not None:
            self._attempt(fit_vocabulary, self._model, self._tokenizer)
        for name in ("teacher", "value", "reward"):
            if hasattr(self._sources.get(name), "store"):
                self._attempt(_check_new_tokens, self._tokenizer, self._sources[name], name)
        if self._has("optimizer", "checkpointer"):
            check_savable_tokenizer(self._tokenizer)

    def check_components(self) -> None:
        """Check what trains, measures and logs, and the files of the data."""
        cfg = self._cfg
        if self._has("optimizer"):
            self._attempt(_check_optimizer, cfg, self._device, self._model)
        if self._has("loss"):
            self._attempt(config.instantiate, cfg.loss)
        if cfg.scores:
            self._attempt(lambda: evaluation.check_score_names(cfg.scores))
        if self._has("metric_logger"):
            self._attempt(_check_logger, cfg.metric_logger)
        if self._has("collate_fn"):
            self._attempt(instantiate_collate, cfg.collate_fn, self._tokenizer)
        for name in ("dataset", "dataset_val"):
            if self._has(name):
                self._attempt(_check_sources, getattr(cfg, name))


def _check_new_tokens(tokenizer: Any, source: Any, name: str) -> None:
    """Raise :class:`UserError` if a frozen model does not know the tokens that the config adds."""
    role = name
    if name != "teacher":
        role += " model"
    reason = explain_unknown_tokens(tokenizer, Path(source.store.source().checkpoint_dir), role)
    if reason is not None:
        raise UserError(f"{name}_checkpointer: {reason}")


def _build_model(cfg: SettingsView) -> torch.nn.Module:
    """Build the model of a run on the meta device."""
    model, _, _ = build_on_meta(cfg)
    return model


def _check_parallel(cfg: SettingsView, model: torch.nn.Module, dims: ParallelDims) -> None:
    """Check that a model can be distributed, with the tensor-parallel plan of the settings if they have one."""
    make_plan = None
    if cfg.tensor_parallel_plan is not None:
        make_plan = functools.partial(config.instantiate, cfg.tensor_parallel_plan)  # called with the model
    check_parallelizable(model, dims, make_plan)


# A recipe with one of these settings trains on images only if the model represents images by tokens in the text.
_TEXT_SETTINGS = ("ref_checkpointer", "sampler", "teacher_model")


def _check_images(cfg: SettingsView, model: torch.nn.Module) -> None:
    """Raise if a model with images is trained by a recipe for text."""
    if text_decoder(model) is model:
        return  # it has no vision tower
    settings = ["ref_policy_checkpointer"]
    if not isinstance(model, ImageTextModel):
        settings.extend(_TEXT_SETTINGS)
    if any(name in cfg.declared for name in settings):
        raise UserError(
            f"model: a {type(model).__name__} reads images, and this recipe trains on text only: use a full_finetune "
            "or lora_finetune recipe, or a text model."
        )


def _check_trained(cfg: SettingsView, model: torch.nn.Module, checkpointer: Any) -> None:
    """Check that there are trained parameters and that the recipe saves all of them.

    Custom recipes may save other parameters, so they are checked only if they have ``save_adapter_weights_only``.
    """
    saves_adapters = "save_adapter_weights_only" in cfg.declared
    # The name in the config may be a former one, which promises what is trained. The file that runs has a current name.
    shipped_recipe = shipped_recipe_of(cfg.source)
    if "weights" in promises(cfg.recipe) and has_adapters(model):
        raise UserError(
            f"model: it has adapters, but {cfg.recipe} trains all weights: use a builder without adapters, or the "
            f"recipe {current_name(cfg.recipe)}, which trains adapters if the model has them."
        )
    if "adapters" in promises(cfg.recipe) | promises(shipped_recipe):
        require_adapters(model)
    elif shipped_recipe is None and not saves_adapters:
        return  # a recipe of the user's own
    else:
        require_trained(model)
    if hasattr(checkpointer, "check_contents"):
        contents = "model"
        if saves_adapters:
            contents = checkpoint_contents(model, merge=not cfg.save_adapter_weights_only)
        checkpointer.check_contents(model, contents=contents)


def _check_optimizer(cfg: SettingsView, device: torch.device | None, model: torch.nn.Module | None) -> None:
    """Reject optimizers that cannot be built, or that the device or the recipe's loop does not support."""
    path = str(cfg.optimizer["_component_"])
    offloads = path.endswith(".CPUOffloadOptimizer")
    needs_cuda = offloads or path.startswith("bitsandbytes.")
    if path.startswith("schedulefree."):
        raise UserError(
            f"optimizer: {path} has a train and an eval mode, which recipes do not switch: use torch.optim.AdamW with "
            "an lr_scheduler."
        )
    if needs_cuda and device is not None and device.type != "cuda":
        raise UserError(f"optimizer: {path} needs device=cuda, not {device.type}: use torchao.optim.AdamW8bit.")
    # With a lower precision, recipes with the setting optimizer_precision step fp32 copies of the parameters unless
    # told otherwise.
    steps_copies = weight_dtype(cfg) != "fp32" and cfg.optimizer_precision not in (None, "param_dtype")
    # CPUOffloadOptimizer hooks into the backward pass itself, and steps its own copies of the parameters on the host.
    if offloads and (cfg.optimizer_in_bwd or steps_copies):
        raise UserError(
            f"optimizer: {path} updates copies of the parameters: set optimizer_precision=param_dtype and "
            "optimizer_in_bwd=False."
        )
    trained = []
    if model is not None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if path == "torch.optim.Muon":
        for name, parameter in trained:
            if parameter.dim() != 2:
                raise UserError(
                    f"optimizer: {path} only updates matrices, but {name} has {parameter.dim()} dimensions: use "
                    "torchtune.training.MuonWithAdamW."
                )
    if needs_cuda:
        locate(path)  # its package must be there, but without CUDA it cannot be built
        return
    # Of one small matrix, so that no states of the size of the model are allocated.
    matrix = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = config.instantiate(cfg.optimizer, [matrix])
    if isinstance(optimizer, GroupedOptimizer) and model is not None:
        optimizer.check(trained, model)  # its patterns must match names of the model, which the matrix lacks


def _check_logger(node: Any) -> None:
    """Check the packages and methods of a metric logger; it is not built, because building has side effects."""
    logger = locate(node["_component_"])
    if not isinstance(logger, type):
        return
    for method in ("log", "log_dict", "log_config", "close"):
        if not callable(getattr(logger, method, None)):
            raise UserError(f"metric_logger: {node['_component_']} has no method {method}: recipes call it.")
    if issubclass(logger, TrackingLogger):
        logger.check_ready(node)


def _check_sources(dataset: Any) -> None:
    """Check that the files of built-in datasets exist; other datasets are not built."""
    if is_mixture(dataset):
        mixture_examples(dataset, [1] * len(dataset["datasets"]))
    for node in dataset_nodes(dataset):
        if str(node.get("_component_")).startswith("torchtune.datasets."):
            with preview(0), suppress(NotRead):  # opens the files, and reads no row
                instantiate_dataset(node, _NoTokenizer())


class _NoTokenizer:
    """Placeholder for the tokenizer, which checks of file names do not use."""

    def __call__(self, sample: Any, inference: bool = False) -> Any:
        """Raise: no row is read."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):  # of a protocol of Python, such as copy's, which asks whether it is there
            raise AttributeError(name)
        return None

    max_seq_len = 1
    end_ids = ()


def shipped_recipe_of(settings: Any) -> str | None:
    """Return the name of the library's recipe that defines the class of settings; None for any other file."""
    file = getattr(sys.modules.get(type(settings).__module__), "__file__", None)
    if file is None:
        return None
    return recipe_at(file)


def check_settings(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, problem and remedy) for settings that exclude each other.

    Args:
        settings: settings of a training recipe; see any recipe's ``Settings`` for the names.

    Raises:
        RecipeSettingsError: a name that the library reads is missing, or its value has the wrong type.
    """
    cfg = SettingsView.of(settings)
    if cfg.optimizer_in_bwd and cfg.clip_grad_norm is not None:
        yield "clip_grad_norm", "needs all gradients at once: set it to null or optimizer_in_bwd to False"
    if cfg.optimizer_in_bwd and (cfg.gradient_accumulation_steps or 1) > 1:
        yield "gradient_accumulation_steps", "must be 1 with optimizer_in_bwd, which keeps no gradients"
    # Cached gradients of an embedding model: every part of a batch has a backward pass of its own.
    if isinstance(cfg.loss, Mapping) and cfg.loss.get("texts_per_pass") is not None:
        if cfg.optimizer_in_bwd:
            yield "optimizer_in_bwd", "must be False with loss.texts_per_pass, which adds up gradients of passes"
        if (cfg.context_parallel_dim or 1) > 1:
            yield "context_parallel_dim", "must be 1 with loss.texts_per_pass, which does not split texts"
    if cfg.ac_mode is not None and cfg.enable_activation_checkpointing:
        yield "ac_mode", "recomputes some layers and enable_activation_checkpointing all of them: set one of the two"
    recomputes_every_nth = str(cfg.ac_option).isdigit() and int(cfg.ac_option) > 0
    if cfg.ac_mode == "selective" and cfg.ac_option != "op" and not recomputes_every_nth:
        yield "ac_option", "must be op or a number from 1 on with ac_mode=selective"
    if cfg.ac_option is not None and cfg.ac_mode != "selective":
        yield "ac_option", "needs ac_mode=selective"
    if cfg.enable_activation_offloading and not (cfg.enable_activation_checkpointing or cfg.ac_mode):
        yield "enable_activation_offloading", "needs enable_activation_checkpointing=True, or ac_mode"
    # Without a setting, the device is known when the run starts.
    if cfg.enable_activation_offloading and cfg.device is not None and not cfg.device.startswith("cuda"):
        yield "enable_activation_offloading", f"needs device=cuda, not {cfg.device}"
    try:
        parse_device(cfg.device)
    except UserError as error:
        yield "device", str(error).removeprefix("device: ").rstrip(".")  # the name and the full stop are added later
    if cfg.fake_quant_after_n_steps is not None and cfg.quantizer is None:
        yield "fake_quant_after_n_steps", "needs a quantizer, which defines the simulated format"
    if cfg.run_val_every_n_steps is not None and cfg.dataset_val is None:
        yield "run_val_every_n_steps", "needs dataset_val"
    if cfg.scores and cfg.run_val_every_n_steps is None:
        yield "scores", "are measured during validation: set run_val_every_n_steps and dataset_val"
    if cfg.scores and (cfg.context_parallel_dim or 1) > 1:
        yield "scores", "need context_parallel_dim=1, because parts of a sequence cannot generate"
    if cfg.keep_best is not None:
        yield from _check_kept_score(cfg.keep_best, cfg.scores or ())
    # A copied recipe may measure a metric of its own, without the settings of validation.
    has_own_metric = cfg.keep_best is not None and BestValidation.is_own_metric(cfg.keep_best)
    for name in ("keep_best", "early_stopping_patience"):
        if getattr(cfg, name) is not None and cfg.run_val_every_n_steps is None and not has_own_metric:
            yield name, "compares validation results: set run_val_every_n_steps and dataset_val"
    if has_own_metric and shipped_recipe_of(settings) is not None:
        yield (
            "keep_best",
            f"must be a validation metric, such as val_loss or max:val_accuracy, not {cfg.keep_best} (a copied recipe "
            "may pass one of its own to record_validation)",
        )


# Validation metrics with names like those of scores.
_OTHER_METRICS = ("val_accuracy", "val_entropy", "val_f1", "val_loss", "val_mae", "val_r2", "val_token_accuracy")


def _check_kept_score(keep_best: str, scores: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the problem of a ``keep_best`` that names a score wrongly; other metrics are known when a run validates."""
    from torchtune.evaluation import NAMED_SCORES, RETRIEVAL_SCORES  # slow to import

    metric = keep_best.removeprefix("max:")
    measured = []
    for score in scores:
        name = as_written(score).partition(":")[0]  # without a pattern
        if name == "retrieval":
            measured += [f"val_{metric_name}" for metric_name in RETRIEVAL_SCORES]
        else:
            measured.append(f"val_{name.rpartition('.')[2]}")  # a function of the user's own is named by its path
    if metric in measured:
        if metric == keep_best:  # without "max:", the lowest value is the best
            yield "keep_best", f"would keep the lowest score: set max:{metric}, because more is better"
    elif metric.removeprefix("val_") in NAMED_SCORES:
        name = metric.removeprefix("val_")
        yield "keep_best", f"names {metric}, which is measured if scores has '{name}': set scores=[{name}]"
    elif metric not in _OTHER_METRICS:
        # Only a likely typing error is a problem here: a recipe may validate with other metrics.
        suggestion = did_you_mean(metric, measured)
        if suggestion:
            yield "keep_best", f"validation has no {metric}{suggestion}"
