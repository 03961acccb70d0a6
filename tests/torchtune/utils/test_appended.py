"""What a run writes line by line is there in the end, whatever became of its folder meanwhile."""

import json
import math
import shutil

import pytest

from torchtune.training.metric_logging import DiskLogger
from torchtune.utils import AppendedFile, close_run_logger, get_run_logger


def test_a_folder_that_is_removed(tmp_path, caplog):
    file = AppendedFile(tmp_path / "run" / "logs" / "log")
    number = file.descriptor
    file.write(b"one\n")
    shutil.rmtree(tmp_path / "run")
    file.write(b"two\n")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    file.close()
    assert (tmp_path / "run" / "logs" / "log").read_bytes() == b"one\ntwo\n"
    assert file.descriptor == number
    assert [record.getMessage().count("was removed under the running run") for record in caplog.records] == [1, 1]


def test_a_file_that_another_has_made_in_its_place(tmp_path):
    file = AppendedFile(tmp_path / "log")
    file.write(b"one\n")
    (tmp_path / "log").rename(tmp_path / "old")
    (tmp_path / "log").write_bytes(b"new\n")
    file.write(b"two\n")
    file.close()
    assert ((tmp_path / "old").read_bytes(), (tmp_path / "log").read_bytes()) == (b"one\n", b"new\ntwo\n")


def test_metrics_and_messages_of_a_run_whose_folder_is_removed(tmp_path):
    log = get_run_logger(tmp_path / "run")
    metrics = DiskLogger(str(tmp_path / "run" / "logs"), output_fmt="jsonl")
    try:
        log.info("before")
        metrics.log_dict({"loss": 1.0}, step=1)
        shutil.rmtree(tmp_path / "run")
        metrics.log_dict({"loss": math.nan, "grad_norm": math.inf}, step=2)
    finally:
        metrics.close()
        close_run_logger()
    lines = (tmp_path / "run" / "logs" / "log.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert read == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None, "grad_norm": None}]
    said = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "before" in said
    assert "log.jsonl was removed under the running run" in said
