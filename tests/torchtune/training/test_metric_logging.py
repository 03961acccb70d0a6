import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from torchtune.training.metric_logging import (
    CometLogger,
    DiskLogger,
    MLFlowLogger,
    StdoutLogger,
    TensorBoardLogger,
    WandBLogger,
    flatten_dict,
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


def test_flatten():
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


def test_an_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="output_fmt='csv' is not known: use txt or jsonl"):
        DiskLogger(str(tmp_path), output_fmt="csv")


def test_standard_output(capsys, cfg):
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
        (lambda: WandBLogger(), "wandb", "wandb"),
        (lambda: CometLogger(), "comet_ml", "comet"),
        (lambda: MLFlowLogger(), "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(make, package, extra):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=rf"needs the package '{package}'.*pip install 'torchtune\[{extra}\]'"):
        make()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline(tmp_path, cfg):
    logger = WandBLogger(log_dir=str(tmp_path), mode="offline")
    logger.log_config(cfg)
    logger.log_dict({"loss": torch.tensor(1.0)}, step=1)
    logger.close()
    assert (tmp_path / "wandb_run_id.txt").read_text()
    assert list(Path(tmp_path).rglob("*.wandb"))
