"""Metric loggers: a file, the terminal, or a tracking service."""

import contextlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np
import yaml
from torch import Tensor

from torchtune.utils import (
    AppendedFile,
    ObserverGuard,
    UserError,
    above_bars,
    atomic_write,
    first_line,
    get_logger,
    get_world_size_and_rank,
    kept_random_state,
    require,
    valid_json,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from torchtune.training.parallel._parallel_dims import ParallelDims

__all__ = [
    "CometLogger",
    "DiskLogger",
    "GuardedLogger",
    "LateMetrics",
    "MLFlowLogger",
    "MetricLoggerInterface",
    "SilentLogger",
    "StdoutLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandBLogger",
    "flatten_dict",
    "main_process_logger",
    "save_config",
]

Scalar: TypeAlias = Tensor | np.ndarray | int | float


def to_number(data: Scalar) -> int | float:
    """Return a number, a scalar tensor or a scalar array as a number."""
    if hasattr(data, "item"):
        return data.item()
    return data


def save_config(config: "DictConfig") -> Path:
    """Write the resolved config to ``{config.output_dir}/torchtune_config.yaml`` and return the path."""
    from torchtune.config import save_config as write_config

    path = Path(config.output_dir) / "torchtune_config.yaml"
    write_config(config, path)
    return path


def flatten_dict(d: dict[str, Any], *, sep: str = ".", parent_key: str = "") -> dict[str, Any]:
    """Flatten nested dicts; keys become paths: ``{"a": {"b": 1}}`` -> ``{"a.b": 1}``.

    Example:
        >>> torchtune.training.metric_logging.flatten_dict({"a": {"b": 1}})
        {'a.b': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in d.items():
        path = str(key)
        if parent_key:
            path = f"{parent_key}{sep}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten_dict(dict(value), sep=sep, parent_key=path))
        else:
            flat[path] = value
    return flat


class MetricLoggerInterface(Protocol):
    """Interface of a metric logger."""

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one scalar.

        Args:
            name: name of the metric.
            data: its value.
            step: number of the optimizer step.
        """
        self.log_dict({name: data}, step)

    def log_config(self, config: "DictConfig") -> None:
        """Log the resolved config, and write it to ``{config.output_dir}/torchtune_config.yaml``."""
        save_config(config)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several scalars of one step."""

    def log_answers(self, answers: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log sampled answers (rows of ``rollouts.jsonl``); does nothing by default."""

    def close(self) -> None:
        """Write pending metrics, and close files and connections."""


class TrackingLogger(MetricLoggerInterface):
    """Base class of loggers that need an optional package; they log on rank 0 only."""

    _package: ClassVar[str]
    _extra: ClassVar[str]
    _run: Any = None  # the package's object that logs; None on other ranks and after closing

    @classmethod
    def check_installed(cls) -> ModuleType:
        """Return the imported package. Raises ``UserError`` if it is not installed."""
        return require(cls._package, extra=cls._extra, purpose=cls.__name__)

    @classmethod
    def check_ready(cls, settings: Mapping[str, Any]) -> None:
        """Check before a run that the logger can start with these arguments of its constructor.

        Raises:
            UserError: the package is not installed, or its account is not set up on this machine.
        """
        cls.check_installed()

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several scalars of one step."""
        if self._run is not None:
            numbers = {name: to_number(data) for name, data in payload.items()}
            self._send(numbers, step)

    def log_config(self, config: "DictConfig") -> None:
        """Log the resolved config, and write it to ``{config.output_dir}/torchtune_config.yaml``."""
        if self._run is not None:
            path = save_config(config)
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
            self._send_config(settings, path)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._finish()
            self._run = None

    def _send(self, numbers: dict[str, int | float], step: int) -> None:
        """Log the numbers of one step by the package."""
        raise NotImplementedError

    def _send_config(self, settings: dict[str, Any], path: Path) -> None:
        """Log the settings by the package; ``path`` is the file with them."""
        raise NotImplementedError

    def _finish(self) -> None:
        """End the run of the package."""
        self._run.finish()


class DiskLogger(MetricLoggerInterface):
    """Metric logger that appends one line per call to a text file; a resumed run appends to the same file.

    In ``jsonl`` files, NaN is ``null``, because JSON has no NaN.

    ``txt`` lines read ``Step 3 | loss:1.5 lr:2e-05``, ``jsonl`` lines ``{"step": 3, "loss": 1.5, "lr": 2e-05}``.

    Args:
        log_dir: folder of the file.
        output_fmt: ``"txt"`` or ``"jsonl"``.
        filename: name of the file; ``log.txt`` or ``log.jsonl`` by default.
        kwargs: ignored.

    Raises:
        ValueError: ``output_fmt`` is unknown.

    Example:
        >>> logger = torchtune.training.metric_logging.DiskLogger(str(folder))
        >>> logger.log("loss", 1.5, step=1)
        >>> logger.close()
    """

    def __init__(self, log_dir: str, output_fmt: str = "txt", filename: str | None = None, **kwargs: Any) -> None:
        if output_fmt not in ("txt", "jsonl"):
            raise ValueError(f"metric_logger: output_fmt={output_fmt!r} is not known: use txt or jsonl.")
        self.log_dir = Path(log_dir)
        self.output_fmt = output_fmt
        self._file_name = self.log_dir / (filename or f"log.{output_fmt}")
        self._file: AppendedFile | None = AppendedFile(self._file_name)
        get_logger().info(f"Metrics are written to {self._file_name}.")

    def path_to_log_file(self) -> Path:
        """Return the path of the file."""
        return self._file_name

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Write the scalars of one step as one line."""
        numbers = {name: to_number(data) for name, data in payload.items()}
        if self.output_fmt == "jsonl":
            line = json.dumps(valid_json({"step": step, **numbers}), allow_nan=False)
        else:
            metrics = " ".join(f"{name}:{number}" for name, number in numbers.items())
            line = f"Step {step} | {metrics}"
        self._file.write_line(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


class StdoutLogger(MetricLoggerInterface):
    """Metric logger that prints to standard output.

    Example:
        >>> logger = torchtune.training.metric_logging.StdoutLogger()
        >>> logger.log("loss", 1.5, step=1)
        Step 1 | loss:1.5
    """

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Print the scalars of one step in one line."""
        metrics = " ".join(f"{name}:{to_number(data)}" for name, data in payload.items())
        with above_bars(sys.stdout):
            print(f"Step {step} | {metrics}", flush=True)

    def close(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()


class WandBLogger(TrackingLogger):
    """Metric logger for Weights & Biases, on rank 0 (``pip install 'torchtune[wandb]'``).

    With ``log_dir``, the id of the run is stored there, and a resumed run continues the same curves.

    Args:
        project: name of the project.
        entity: user or team; by default the account's.
        group: group of runs.
        log_dir: folder of W&B's files.
        kwargs: arguments of ``wandb.init``, for example ``mode="offline"``, ``name`` or ``id``.

    Raises:
        UserError: wandb is not installed, or this machine has no valid API key.

    Example:
        >>> logger = torchtune.training.metric_logging.WandBLogger(project="mine")  # doctest: +SKIP
    """

    _package = _extra = "wandb"

    @classmethod
    def check_ready(cls, settings: Mapping[str, Any]) -> None:
        """Check that wandb is installed and, unless it runs offline or can ask for it, has an API key."""
        wandb = cls.check_installed()
        mode = settings.get("mode") or os.environ.get("WANDB_MODE", "online")
        # Earlier releases of wandb cannot look for a key without asking for it: the constructor finds out then.
        can_look = "prompt" in inspect.signature(wandb.login).parameters
        if mode not in ("online", "shared") or sys.stdin.isatty() or not can_look:
            return
        try:
            has_key = wandb.login(prompt=False)
        except wandb.errors.AuthenticationError as error:
            raise _no_account(error) from error
        except wandb.errors.CommError:  # a server that does not answer is no mistake in the settings
            return
        if not has_key:
            raise _no_account(None)

    def __init__(
        self,
        project: str = "torchtune",
        entity: str | None = None,
        group: str | None = None,
        log_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        wandb = self.check_installed()  # on all ranks: a missing package ends all of them
        if not _is_rank_0():
            return
        if "id" not in kwargs:
            stored_id = _stored_name(log_dir, "wandb_run_id.txt")
            if stored_id:
                kwargs = {"id": stored_id, "resume": "allow", **kwargs}
        if log_dir is not None:  # wandb writes to a temporary folder if it is missing
            Path(log_dir).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project, entity=entity, group=group, dir=log_dir, **kwargs)
        except wandb.errors.AuthenticationError as error:
            raise _no_account(error) from error
        except wandb.errors.UsageError as error:
            if "API key" in str(error):
                raise _no_account(None) from error
            raise LoggerSettingsError(error) from error
        _store_name(log_dir, "wandb_run_id.txt", self._run.id)
        # The x-axis of all charts is the optimizer step, not the service's own count of calls.
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step", step_sync=True)

    def _send_config(self, settings: dict[str, Any], path: Path) -> None:
        self._run.config.update(settings, allow_val_change=True)

    def _send(self, numbers: dict[str, int | float], step: int) -> None:
        self._run.log({**numbers, "global_step": step})


class TensorBoardLogger(TrackingLogger):
    """Metric logger that writes TensorBoard event files, on rank 0 (``pip install 'torchtune[tensorboard]'``).

    A resumed run adds an event file to the same folder, which TensorBoard shows as one curve.

    Args:
        log_dir: folder of the event files.
        organize_logs: write to the subfolder ``run``, apart from other files in ``log_dir``.
        kwargs: arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        UserError: tensorboard is not installed.

    Example:
        >>> logger = torchtune.training.metric_logging.TensorBoardLogger("/tmp/run/logs")  # doctest: +SKIP
    """

    _package = _extra = "tensorboard"

    def __init__(self, log_dir: str, organize_logs: bool = True, **kwargs: Any) -> None:
        self.check_installed()
        if _is_rank_0():
            from torch.utils.tensorboard import SummaryWriter

            self.log_dir = Path(log_dir)
            if organize_logs:
                self.log_dir = self.log_dir / "run"
            self._run = SummaryWriter(log_dir=str(self.log_dir), **kwargs)

    def _send_config(self, settings: dict[str, Any], path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        code_block = "\n".join("    " + line for line in text.splitlines())  # TensorBoard renders Markdown
        self._run.add_text("config", code_block)

    def _send(self, numbers: dict[str, int | float], step: int) -> None:
        for name, number in numbers.items():
            self._run.add_scalar(name, number, global_step=step, new_style=True)

    def _finish(self) -> None:
        self._run.close()


class CometLogger(TrackingLogger):
    """Metric logger for Comet, on rank 0 (``pip install 'torchtune[comet]'``).

    Args:
        api_key: key of the account; by default from Comet's own configuration.
        workspace: workspace; by default the account's.
        project: name of the project.
        experiment_key: key of an experiment to continue.
        mode: ``"get_or_create"``, ``"get"`` or ``"create"``.
        online: False writes an offline archive.
        experiment_name: name of the experiment.
        tags: tags of the experiment.
        log_code: log the code of the run.
        kwargs: arguments of ``comet_ml.ExperimentConfig``.

    Raises:
        UserError: comet_ml is not installed.

    Example:
        >>> logger = torchtune.training.metric_logging.CometLogger(project="mine", online=False)  # doctest: +SKIP
    """

    _package = "comet_ml"
    _extra = "comet"

    def __init__(
        self,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: str | None = None,
        online: bool | None = None,
        experiment_name: str | None = None,
        tags: list[str] | None = None,
        log_code: bool = True,
        **kwargs: Any,
    ) -> None:
        comet_ml = self.check_installed()
        if _is_rank_0():
            options = comet_ml.ExperimentConfig(log_code=log_code, tags=tags, name=experiment_name, **kwargs)
            self._run = comet_ml.start(
                api_key=api_key,
                workspace=workspace,
                project=project,
                experiment_key=experiment_key,
                mode=mode,
                online=online,
                experiment_config=options,
            )

    def _send_config(self, settings: dict[str, Any], path: Path) -> None:
        self._run.log_parameters(flatten_dict(settings))
        self._run.log_asset(str(path))

    def _send(self, numbers: dict[str, int | float], step: int) -> None:
        self._run.log_metrics(numbers, step=step)

    def _finish(self) -> None:
        self._run.end()


class MLFlowLogger(TrackingLogger):
    """Metric logger for MLflow, on rank 0 (``pip install 'torchtune[mlflow]'``).

    Args:
        experiment_name: experiment; by default MLflow's default one.
        tracking_uri: server, or folder of a SQLite database and its artifacts; by default ``MLFLOW_TRACKING_URI``.
        run_id: run to continue.
        run_name: name of a new run.

    Raises:
        UserError: mlflow is not installed.

    Example:
        >>> logger = torchtune.training.metric_logging.MLFlowLogger("mine", tracking_uri="mlruns")  # doctest: +SKIP
    """

    _package = _extra = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        run_name: str | None = None,
    ) -> None:
        self._mlflow = self.check_installed()
        if not _is_rank_0():
            return
        # A URI without a scheme is a path, except for "databricks", MLflow's name for a hosted server.
        is_folder = tracking_uri is not None and ":" not in tracking_uri and tracking_uri != "databricks"
        if is_folder:  # MLflow no longer writes to a folder without a database
            folder = Path(tracking_uri).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            self._mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
            name = experiment_name or "Default"  # MLflow's default experiment
            if self._mlflow.get_experiment_by_name(name) is None:
                # Without a location, artifacts would go to the working directory.
                self._mlflow.create_experiment(name, artifact_location=(folder / "artifacts").as_uri())
        elif tracking_uri is not None:
            self._mlflow.set_tracking_uri(tracking_uri)
        if experiment_name is not None:
            self._mlflow.set_experiment(experiment_name)
        self._run = self._mlflow.start_run(run_id=run_id, run_name=run_name)

    def _send_config(self, settings: dict[str, Any], path: Path) -> None:
        flat = {key: str(value) for key, value in flatten_dict(settings).items()}
        with contextlib.suppress(self._mlflow.exceptions.MlflowException):  # parameters of a run are immutable
            self._mlflow.log_params(flat)
        self._mlflow.log_artifact(str(path))

    def _send(self, numbers: dict[str, int | float], step: int) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def _finish(self) -> None:
        self._mlflow.end_run()


class TrackioLogger(TrackingLogger):
    """Metric logger for Trackio, on rank 0 (``pip install 'torchtune[trackio]'``); ``trackio show`` opens it.

    Sampled answers of GRPO and PPO are logged as traces with their rewards. Metrics that are not finite and skipped
    steps raise alerts. With ``log_dir``, the name of the run is stored there, and a resumed run continues its curves.

    Args:
        project: name of the project.
        name: name of the run; by default chosen by Trackio.
        log_dir: folder of the stored name.
        kwargs: arguments of ``trackio.init``, for example ``space_id`` or ``webhook_url``.

    Raises:
        UserError: trackio is not installed.

    Example:
        >>> logger = torchtune.training.metric_logging.TrackioLogger(project="mine")  # doctest: +SKIP
    """

    _package = _extra = "trackio"

    def __init__(
        self, project: str = "torchtune", name: str | None = None, log_dir: str | None = None, **kwargs: Any
    ) -> None:
        self._trackio = self.check_installed()
        self._skipped = 0
        if _is_rank_0():
            if not name:
                name = _stored_name(log_dir, "trackio_run_name.txt")
            options = {"resume": "allow", "embed": False, **kwargs}
            self._run = self._trackio.init(project, name=name, **options)
            _store_name(log_dir, "trackio_run_name.txt", self._run.name)

    def _send_config(self, settings: dict[str, Any], path: Path) -> None:
        self._run.config.update(settings)

    def _send(self, numbers: dict[str, int | float], step: int) -> None:
        self._run.log(numbers, step=step)
        warnings = []
        for name, number in numbers.items():
            if not math.isfinite(number):
                warnings.append(f"{name} is {number}")
        skipped = numbers.get("skipped_steps", 0)
        if skipped > self._skipped:  # one alert for each skipped step, not for each line after it
            warnings.append(f"{skipped} steps are skipped so far")
            self._skipped = skipped
        if warnings:
            self._run.alert(f"Step {step}", "; ".join(warnings), level=self._trackio.AlertLevel.WARN)

    def log_answers(self, answers: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log answers as traces, with everything but the texts as metadata."""
        if self._run is None or not answers:
            return
        traces = []
        for row in answers:
            messages = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
            metadata = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
            traces.append(self._trackio.Trace(messages, metadata))
        self._run.log({"answers": traces}, step=step)


class LoggerSettingsError(UserError):
    """The settings of the metric logger are wrong, or its account is not set up.

    Args:
        error: the sentence, or the error of the logger's package.
    """

    def __init__(self, error: Exception | str) -> None:
        super().__init__(f"metric_logger: {' '.join(str(error).split())}")


def _no_account(error: Exception | None) -> LoggerSettingsError:
    """Return the error for a machine without a valid key of Weights & Biases."""
    reason = "no API key is set up on this machine"
    if error is not None:
        reason = f"the API key is refused ({first_line(error)})"
    remedy = "run `wandb login`, or set WANDB_API_KEY, or metric_logger.mode=offline"
    return LoggerSettingsError(f"Weights & Biases cannot log, {reason}: {remedy}.")


def _is_rank_0() -> bool:
    _, rank = get_world_size_and_rank()
    return rank == 0


def _stored_name(folder: str | None, file: str) -> str | None:
    """Return the stored name of the run that this run continues; None if there is none."""
    if folder is None:
        return None
    path = Path(folder) / file
    if not path.exists():
        return None
    return path.read_text(encoding="utf-8").strip()


def _store_name(folder: str | None, file: str, name: str) -> None:
    """Store the name of the run in ``folder``, for a run that continues it."""
    if folder is not None:
        with atomic_write(Path(folder) / file, "w") as stream:
            stream.write(name)


class LateMetrics(MutableMapping[str, Any]):
    """Metrics of a step whose numbers are still on their way from the device.

    Entries can be added at once; reading waits for the numbers. So that nobody needs to wait, loggers and progress bars
    read after the step is settled, which :class:`~torchtune.supervision.RunControl` does in the next step, and before a
    validation or a checkpoint.

    Args:
        receive: waits for the numbers, and returns them; called once.
        is_bad: scalar tensor on the device, whether loss or gradient norm are not finite on any rank.
        loss_is_finite: scalar tensor on the device, whether the loss is finite on all ranks.

    Attributes:
        is_bad: see above.
        loss_is_finite: see above.

    Example:
        >>> from torchtune.training import LateMetrics
        >>> metrics = LateMetrics(lambda: {"loss": 2.0}, torch.tensor(False), torch.tensor(True))
        >>> metrics["lr"] = 0.1
        >>> metrics.when_settled(lambda: print(dict(metrics)))
        >>> metrics.settle()
        {'loss': 2.0, 'lr': 0.1}
    """

    def __init__(self, receive: Callable[[], dict[str, Any]], is_bad: Tensor, loss_is_finite: Tensor) -> None:
        self.is_bad = is_bad
        self.loss_is_finite = loss_is_finite
        self._receive: Callable[[], dict[str, Any]] | None = receive
        self._entries: dict[str, Any] = {}
        self._readers: list[Callable[[], None]] = []
        self._is_settled = False

    def when_settled(self, reader: Callable[[], None]) -> None:
        """Call ``reader`` when the step is settled, after all readers before it; at once if it is."""
        if self._is_settled:
            reader()
        else:
            self._readers.append(reader)

    def settle(self) -> None:
        """Wait for the numbers, and call the readers; a second call does nothing.

        All ranks call it at the same point, because a reader may be a collective. If one raises, those after it are not
        called.
        """
        if self._is_settled:
            return
        self._is_settled = True
        self._read()
        for reader in self._readers:
            reader()

    def _read(self) -> dict[str, Any]:
        """Return the entries with the numbers, after waiting for them; entries that were added replace them."""
        if self._receive is not None:
            self._entries = {**self._receive(), **self._entries}
            self._receive = None
        return self._entries

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __or__(self, other: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(other, LateMetrics):
            return other.__ror__(self)
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> "LateMetrics":
        """Add the entries of metrics before these, as of an earlier update of the same step."""
        receive = self._receive
        if receive is None:
            self._entries = {**other, **self._entries}
        else:
            self._receive = lambda: {**other, **receive()}
        return self

    def __ior__(self, other: Mapping[str, Any]) -> "LateMetrics":
        self.update(other)
        return self


class SilentLogger(MetricLoggerInterface):
    """Metric logger that logs nothing, for all ranks but the first.

    Example:
        >>> torchtune.training.metric_logging.SilentLogger().log("loss", 1.5, step=1)
    """

    def log_config(self, config: "DictConfig") -> None:
        """Do nothing."""


class GuardedLogger(MetricLoggerInterface):
    """Passes all calls to another logger, whose errors end no run and which changes no random numbers.

    The first error is logged as a warning. The resolved config is written to ``{config.output_dir}`` in any case,
    because other commands read it. Other attributes are those of the logger.

    Args:
        logger: the logger.

    Example:
        >>> logger = torchtune.training.metric_logging.StdoutLogger()
        >>> torchtune.training.metric_logging.GuardedLogger(logger).log("loss", 1.5, step=1)
        Step 1 | loss:1.5
    """

    def __init__(self, logger: MetricLoggerInterface) -> None:
        self._logger = logger
        self._guard = ObserverGuard(f"metric_logger {type(logger).__name__}")
        self._late: LateMetrics | None = None

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function of the logger, after the late metrics of an earlier step: services want steps in order."""
        if self._late is None:
            self._call_now(function)
        else:
            self._late.when_settled(lambda: self._call_now(function))

    def _call_now(self, function: Callable[[], None]) -> None:
        """Call a function of the logger, whose errors end no run and which changes no random numbers."""
        with kept_random_state():
            self._guard.call(function)

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one scalar."""
        self._call(lambda: self._logger.log(name, data, step))

    def log_config(self, config: "DictConfig") -> None:
        """Write the resolved config, and log it."""
        save_config(config)
        self._call(lambda: self._logger.log_config(config))

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several scalars of one step; late ones when they are there."""
        if isinstance(payload, LateMetrics):
            self._late = payload
        # A copy, because the recipe uses its metrics further.
        self._call(lambda: self._logger.log_dict(dict(payload), step=step))

    def log_answers(self, answers: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log sampled answers, if the logger has a method for them."""
        if hasattr(self._logger, "log_answers"):
            self._call(lambda: self._logger.log_answers(answers, step))

    def close(self) -> None:
        """Close the logger; metrics that an error kept from arriving are lost."""
        self._call_now(self._logger.close)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


def main_process_logger(make: Callable[[], MetricLoggerInterface], dims: "ParallelDims") -> MetricLoggerInterface:
    """Return the guarded logger of ``make()`` on the main rank, and a :class:`SilentLogger` on all others.

    A logger that cannot start, because its server does not answer for example, is replaced by a silent one, with a
    warning. Mistakes in its settings are raised; a ``TypeError`` or ``ValueError`` of its constructor counts as one.

    Args:
        make: builds the logger.
        dims: processes of the run.

    Raises:
        UserError: a setting of the logger is wrong, its package is not installed, or its account is not set up.
    """
    if not dims.is_main:
        return SilentLogger()
    try:
        with kept_random_state():
            logger = make()
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise LoggerSettingsError(error) from error
    except Exception as error:  # noqa: BLE001  (whatever the code of a user or of another library raises)
        ObserverGuard("metric_logger").warn(error)
        logger = SilentLogger()
    return GuardedLogger(logger)
