import ast
import importlib.util
import io
import json
import os
import subprocess
import sys
import types
import zipfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from torchtune.training import ParallelDims
from torchtune.training.metric_logging import (
    CometLogger,
    DiskLogger,
    GuardedLogger,
    LateMetrics,
    MLFlowLogger,
    SilentLogger,
    StdoutLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandBLogger,
    flatten_dict,
    main_process_logger,
    save_config,
)
from torchtune.utils import UserError


@pytest.fixture
def cfg(tmp_path):
    return OmegaConf.create({"output_dir": str(tmp_path / "out"), "optimizer": {"lr": 2e-5}, "name": "${optimizer.lr}"})


def test_config_is_written_resolved(cfg, tmp_path):
    path = save_config(cfg)
    assert path == tmp_path / "out" / "torchtune_config.yaml"
    assert OmegaConf.load(path) == {"output_dir": cfg.output_dir, "optimizer": {"lr": 2e-5}, "name": 2e-5}


def test_nested_settings_are_flattened_to_paths():
    assert flatten_dict({"a": {"b": 1, "c": {"d": 2}}, "e": [3], "f": {}}) == {"a.b": 1, "a.c.d": 2, "e": [3], "f": {}}
    assert flatten_dict({"a": {"b": 1}}, sep="/", parent_key="x") == {"x/a/b": 1}


def test_text_lines_of_numbers_arrays_and_tensors(tmp_path, cfg):
    logger = DiskLogger(str(tmp_path / "logs"))
    logger.log("loss", torch.tensor(1.5), step=1)
    logger.log_dict({"loss": np.float64(1.25), "lr": 2e-05, "count": np.array(3)}, step=2)
    logger.log_config(cfg)
    logger.close()
    assert logger.path_to_log_file() == tmp_path / "logs" / "log.txt"
    assert logger.path_to_log_file().read_text() == "Step 1 | loss:1.5\nStep 2 | loss:1.25 lr:2e-05 count:3\n"
    assert (tmp_path / "out" / "torchtune_config.yaml").exists()


def test_json_lines_go_on_after_a_run_that_was_killed(tmp_path):
    logger = DiskLogger(str(tmp_path), output_fmt="jsonl", filename="metrics.jsonl")
    logger.log_dict({"loss": 2.0}, step=1)
    logger.close()
    with logger.path_to_log_file().open("a") as file:
        file.write('{"step": 2, "lo')
    logger = DiskLogger(str(tmp_path), output_fmt="jsonl", filename="metrics.jsonl")
    logger.log_dict({"loss": torch.tensor(1.0)}, step=2)
    lines = logger.path_to_log_file().read_text().splitlines()  # before close: every line is there at once
    logger.close()
    assert [json.loads(line) for line in (lines[0], lines[2])] == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]


def test_unknown_output_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="output_fmt='csv' is not known: use txt or jsonl"):
        DiskLogger(str(tmp_path), output_fmt="csv")


def test_metrics_are_printed_to_standard_output(capsys, cfg):
    logger = StdoutLogger()
    logger.log("loss", torch.tensor(0.5), step=3)
    logger.log_dict({"a": 1, "b": 2.5}, step=4)
    logger.log_config(cfg)
    logger.close()
    assert capsys.readouterr().out == "Step 3 | loss:0.5\nStep 4 | a:1 b:2.5\n"


# tensorboard builds its protocol buffers with calls that numpy and protobuf announce the end of
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_continues_one_curve(tmp_path, cfg):
    for first in (1, 3):
        logger = TensorBoardLogger(str(tmp_path))
        logger.log("loss", torch.tensor(1.0 / first), step=first)
        logger.log_dict({"loss": 1.0 / (first + 1), "lr": 0.5}, step=first + 1)
        logger.log_config(cfg)
        logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list((tmp_path / "run").iterdir())) == 2
    points = []
    for file in sorted((tmp_path / "run").iterdir()):
        events = EventAccumulator(str(file)).Reload()
        points += [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("loss")]
        assert "config/text_summary" in events.Tags()["tensors"]
    assert sorted(points) == [(step, pytest.approx(1.0 / step)) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (WandBLogger, "wandb", "wandb"),
        (CometLogger, "comet_ml", "comet"),
        (MLFlowLogger, "mlflow", "mlflow"),
        (TrackioLogger, "trackio", "trackio"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(make, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package '{package}'.*pip install 'torchtune\[{extra}\]'"):
        make()


def installed(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def log_three_steps(logger, cfg):
    """Log a config, two losses and one that is not finite."""
    logger.log_config(cfg)
    logger.log("loss", torch.tensor(1.5), step=1)
    logger.log_dict({"loss": np.float64(1.25), "lr": 2e-5}, step=2)
    logger.log_dict({"loss": float("nan"), "skipped_steps": 1}, step=3)
    logger.close()


@installed("wandb")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_logs_offline(tmp_path, cfg):
    log_three_steps(WandBLogger(log_dir=str(tmp_path), mode="offline"), cfg)
    assert (tmp_path / "wandb_run_id.txt").read_text()
    (file,) = Path(tmp_path).rglob("*.wandb")
    assert b"loss" in file.read_bytes()


@installed("comet_ml")
@pytest.mark.filterwarnings("ignore")
def test_comet_logs_offline(tmp_path, cfg, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log_three_steps(CometLogger(project="mine", online=False, log_code=False), cfg)
    (archive,) = tmp_path.rglob("*.zip")
    with zipfile.ZipFile(archive) as file:
        lines = [json.loads(line) for line in file.read("messages.json").splitlines()]
    metrics = [line["payload"]["metric"] for line in lines if "metric" in line["payload"]]
    logged = [(row["metricName"], row["step"], row["metricValue"]) for row in metrics]
    assert ("loss", 1, 1.5) in logged
    assert ("lr", 2, 2e-5) in logged


@installed("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_logs_to_a_folder(tmp_path, cfg, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log_three_steps(MLFlowLogger("mine", tracking_uri="runs", run_name="first"), cfg)
    import mlflow

    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in points[:2]] == [(1, 1.5), (2, 1.25)]
    assert run.data.params["optimizer.lr"] == "2e-05"
    assert [path.parent.parent.parent.name for path in (tmp_path / "runs").rglob("*.yaml")] == ["artifacts"]
    assert not (tmp_path / "mlruns").exists(), "artifacts are in the folder, too"


class FakeMLflow(types.ModuleType):
    """Stands for the package, and notes its calls; there is no experiment but ``known``."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.exceptions = types.SimpleNamespace(MlflowException=KeyError)
        self.calls = []

    def get_experiment_by_name(self, name):
        return "1" if name == "known" else None

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, *args, *kwargs.items()))
            return name  # of start_run, the run

        return call


@pytest.fixture
def mlflow(monkeypatch):
    module = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


@pytest.mark.parametrize("experiment", [None, "mine", "known"])
def test_mlflow_keeps_runs_and_artifacts_in_a_folder(experiment, mlflow, tmp_path):
    MLFlowLogger(experiment, tracking_uri=str(tmp_path / "runs"))
    calls = [("set_tracking_uri", f"sqlite:///{tmp_path}/runs/mlflow.db")]
    if experiment != "known":
        artifacts = (tmp_path / "runs" / "artifacts").as_uri()
        calls.append(("create_experiment", experiment or "Default", ("artifact_location", artifacts)))
    if experiment is not None:
        calls.append(("set_experiment", experiment))
    assert mlflow.calls == [*calls, ("start_run", ("run_id", None), ("run_name", None))]
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize("uri", [None, "databricks", "http://localhost:5000"])
def test_mlflow_sends_numbers_and_settings_to_a_server(uri, mlflow, cfg, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = MLFlowLogger(tracking_uri=uri, run_id="7", run_name="first")
    log_three_steps(logger, cfg)
    logger.log("loss", 1.0, step=4)  # after closing
    start, log_params, log_artifact, *numbers, end = mlflow.calls[uri is not None :]
    assert mlflow.calls[0] == (start if uri is None else ("set_tracking_uri", uri))
    assert start == ("start_run", ("run_id", "7"), ("run_name", "first"))
    assert log_params[1]["optimizer.lr"] == "2e-05"
    assert log_artifact == ("log_artifact", str(tmp_path / "out" / "torchtune_config.yaml"))
    assert numbers[:2] == [
        ("log_metrics", {"loss": 1.5}, ("step", 1)),
        ("log_metrics", {"loss": 1.25, "lr": 2e-5}, ("step", 2)),
    ]
    assert (len(numbers), end) == (3, ("end_run",))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@installed("trackio")
@pytest.mark.filterwarnings("ignore")
def test_trackio_has_metrics_answers_and_alerts(tmp_path, cfg):
    # trackio reads its folder when it is imported
    code = f"""if True:
        import sys
        from omegaconf import OmegaConf
        from tests.torchtune.training.test_metric_logging import log_three_steps
        from torchtune.training.metric_logging import TrackioLogger
        cfg = OmegaConf.create({OmegaConf.to_container(cfg)!r})
        log_three_steps(TrackioLogger("mine", log_dir={str(tmp_path)!r}, auto_log_cpu=False), cfg)
        logger = TrackioLogger("mine", log_dir={str(tmp_path)!r}, auto_log_cpu=False)  # a resumed run
        logger.log("loss", 0.5, step=4)
        logger.log_answers([{{"step": 4, "prompt": "red?", "answer": "blue", "reward": 0.5}}], 4)
        logger.close()
        from trackio.sqlite_storage import SQLiteStorage as storage
        (run,) = storage.get_runs("mine")
        logs = [(row["step"], row["loss"]) for row in storage.get_logs("mine", run) if "loss" in row]
        (trace,) = storage.get_traces("mine", run)
        alerts = [(row["title"], row["text"]) for row in storage.get_alerts("mine", run)]
        print(repr([str(logs), trace["messages"], trace["metadata"]["reward"], alerts]), file=sys.stderr)
    """
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logs, messages, reward, alerts = ast.literal_eval(done.stderr.splitlines()[-1])
    assert logs == "[(1, 1.5), (2, 1.25), (3, nan), (4, 0.5)]"
    assert [(turn["role"], turn["content"]) for turn in messages] == [("user", "red?"), ("assistant", "blue")]
    assert reward == 0.5
    assert alerts == [("Step 3", "loss is nan; 1 steps are skipped so far")]


class FailingLogger:
    """Every method fails, after it has drawn a random number and taken a metric away."""

    def log_dict(self, payload, step):
        payload.pop("loss")
        torch.rand(1)
        raise ConnectionResetError("the service was killed")

    def log(self, name, data, step):
        raise ConnectionResetError("the service was killed")

    log_config = close = None


def test_failing_logger_changes_nothing_else(cfg, tmp_path, caplog):
    logger = main_process_logger(FailingLogger, ParallelDims())
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    metrics = {"loss": torch.rand(1)}
    logger.log_config(cfg)
    logger.log_dict(metrics, step=1)
    logger.log("loss", 1.0, step=1)
    logger.log_answers([{"prompt": "?", "answer": "!"}], step=1)
    logger.close()
    assert metrics.keys() == {"loss"}
    assert torch.equal(torch.cat([metrics["loss"], torch.rand(1)]), expected)
    assert (tmp_path / "out" / "torchtune_config.yaml").exists(), "other commands read it"
    (message,) = caplog.messages
    assert message.startswith("metric_logger FailingLogger failed (TypeError: 'NoneType'")


def make_failing(error):
    def make():
        raise error

    return make


def test_a_logger_that_cannot_start_is_left_out(cfg, tmp_path, caplog):
    logger = main_process_logger(make_failing(ConnectionError("no server at this address")), ParallelDims())
    logger.log_config(cfg)
    logger.log_dict({"loss": 1.0}, step=1)
    assert caplog.messages == [
        "metric_logger failed (ConnectionError: no server at this address): the run goes on without it."
    ]
    assert (tmp_path / "out" / "torchtune_config.yaml").exists()


@pytest.mark.parametrize("error", [UserError("no account"), TypeError("no argument 'mdoe'"), ValueError("mode is on")])
def test_a_mistake_in_the_settings_of_a_logger_is_refused(error):
    with pytest.raises(UserError, match=str(error)):
        main_process_logger(make_failing(error), ParallelDims())


def test_only_the_main_rank_has_a_logger(tmp_path):
    logger = main_process_logger(lambda: DiskLogger(str(tmp_path)), ParallelDims())
    assert isinstance(logger, GuardedLogger)
    assert logger.path_to_log_file() == tmp_path / "log.txt", "its other attributes are there"
    logger.close()
    other_dims = ParallelDims()
    other_dims.mesh = object()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_rank", lambda: 1)
        assert isinstance(main_process_logger(lambda: pytest.fail("it is built"), other_dims), SilentLogger)


def make_wandb(login=None, init=None):
    """A stand-in for the package, which tests do not install: its errors are those of wandb 0.31."""
    errors = types.SimpleNamespace()
    errors.Error = type("Error", (Exception,), {})
    errors.CommError = type("CommError", (errors.Error,), {})
    errors.AuthenticationError = type("AuthenticationError", (errors.CommError,), {})
    errors.UsageError = type("UsageError", (errors.Error,), {})

    def raise_or_return(value):
        if isinstance(value, tuple):
            raise getattr(errors, value[0])(value[1])
        return value

    package = types.ModuleType("wandb")
    package.errors = errors
    package.login = lambda prompt=True: raise_or_return(login)
    package.init = lambda **kwargs: raise_or_return(init)
    return package


@pytest.mark.parametrize(
    ("login", "settings", "refusal"),
    [
        (False, {}, "no API key is set up on this machine: run `wandb login`"),
        (False, {"mode": "online"}, "no API key is set up on this machine"),
        (
            ("AuthenticationError", "API key has 3 characters"),
            {},
            r"the API key is refused \(API key has 3 characters\)",
        ),
        (False, {"mode": "offline"}, None),
        (("CommError", "no answer"), {}, None),
        (True, {}, None),
    ],
)
def test_weights_and_biases_without_a_key_is_refused_before_the_run(login, settings, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", make_wandb(login=login))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with nullcontext() if refusal is None else pytest.raises(UserError, match=refusal):
        WandBLogger.check_ready(settings)


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (("UsageError", "No API key configured."), "no API key is set up on this machine"),
        (("UsageError", "project is too long"), "metric_logger: project is too long"),
        (("AuthenticationError", "wrong key"), r"the API key is refused \(wrong key\)"),
    ],
)
def test_error_of_weights_and_biases_at_its_start_becomes_one_sentence(error, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", make_wandb(init=error))
    with pytest.raises(UserError, match=refusal):
        main_process_logger(WandBLogger, ParallelDims())


def late_metrics(**numbers):
    waits = []

    def receive():
        waits.append(1)
        return numbers

    return LateMetrics(receive, is_bad=torch.tensor(False), loss_is_finite=torch.tensor(True)), waits


def test_late_metrics_take_entries_without_a_wait():
    metrics, waits = late_metrics(loss=2.0)
    metrics["lr"] = 0.1
    metrics |= {"tokens": 5}
    assert not waits
    assert list(metrics.items()) == [("loss", 2.0), ("lr", 0.1), ("tokens", 5)]
    assert len(metrics) == 3
    assert "loss" in metrics
    assert len(waits) == 1


def test_late_metrics_follow_those_of_an_earlier_update():
    first, waits_of_first = late_metrics(reward=1.0, loss=3.0)
    second, waits_of_second = late_metrics(loss=2.0)
    metrics = {} | first
    first.settle()
    metrics = metrics | second
    metrics["lr"] = 0.1
    assert (len(waits_of_first), len(waits_of_second)) == (1, 0)
    assert dict(metrics) == {"reward": 1.0, "loss": 2.0, "lr": 0.1}


def test_late_metrics_are_a_mapping_for_recipes_of_earlier_releases():
    metrics, _ = late_metrics(loss=2.0)
    plain = {"old": 1}
    plain |= metrics
    assert plain == {"old": 1, "loss": 2.0} == {"old": 1, **metrics}
    assert metrics | {"new": 1} == {"loss": 2.0, "new": 1}


def test_late_metrics_are_logged_in_the_order_of_steps(capsys):
    """Services refuse a step after a later one."""
    logger = GuardedLogger(StdoutLogger())
    metrics, waits = late_metrics(loss=2.0)
    logger.log_dict(metrics, step=1)
    logger.log("reward", 1.0, step=2)
    assert not waits
    assert capsys.readouterr().out == ""
    metrics.settle()
    metrics.settle()
    logger.log("reward", 3.0, step=3)
    assert capsys.readouterr().out == "Step 1 | loss:2.0\nStep 2 | reward:1.0\nStep 3 | reward:3.0\n"
