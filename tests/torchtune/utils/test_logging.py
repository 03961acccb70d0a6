"""The log files of processes, messages on the screen, and deprecation notices."""

import logging
import os
import re
import sys
import warnings
from pathlib import Path

import pytest

from torchtune.utils import (
    close_run_logger,
    deprecate_parameter,
    deprecated,
    dump_stacks,
    dump_stacks_after,
    get_logger,
    get_run_logger,
    log_once,
    log_rank_zero,
    note_in_run_log,
    run_log_path,
)

# A rank of a run on its own, as torchrun starts it.
RANK = """if True:
    import os, sys, warnings
    from torchtune import config, utils
    log = utils.get_run_logger(sys.argv[1], "INFO")
    log.info("loading")
    log.debug("never")
    log.error("bad luck")
    warnings.warn("mind the gap")
    def recipe_main(settings):
        raise utils.UserError("the model is too large: choose another")
    {end}
"""


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_run_logger()


def in_process(rank, folder, end):
    """(exit code, screen, file) of a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        code = RANK.format(end=end)
        os.execv(sys.executable, [sys.executable, "-c", code, str(folder)])
    os.close(write)
    with os.fdopen(read) as screen:
        output = screen.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, output, (folder / "logs" / f"rank_{rank}.log").read_text()


def test_rank_0_is_on_the_screen_and_in_its_file(tmp_path):
    status, screen, file = in_process(0, tmp_path, "1 / 0")
    assert status == 1
    for text in (screen, file):
        assert re.search("loading.*bad luck.*UserWarning: mind the gap.*ZeroDivisionError", text, re.DOTALL)
        assert "never" not in text
    first, second, *_ = file.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO Rank 0 of 2 starts: process \d+ on \S+\.", first)
    assert second.endswith("INFO loading")


def test_ranks_after_the_first_show_errors_alone(tmp_path):
    end = "from torchtune.config import _parse; _parse.load_and_check = lambda *_: None\n"
    end += "    sys.argv = ['recipe', '--config', 'x']; config.parse(recipe_main)()"
    status, screen, file = in_process(1, tmp_path, end)
    assert status == 2
    assert screen.splitlines() == [
        "ERROR:torchtune:bad luck",
        "error: the model is too large: choose another",
    ]
    for text in ("INFO loading", "ERROR bad luck", "mind the gap", "ERROR the model is too large"):
        assert text in file


def test_crash_writes_its_stack_to_the_log(tmp_path):
    status, screen, file = in_process(1, tmp_path, "os.abort()")
    assert status == -6
    assert "Fatal Python error: Aborted" in file
    assert "Aborted" not in screen


def test_a_resumed_run_appends(tmp_path):
    for word in ("one", "two"):
        get_run_logger(tmp_path).info(word)
    lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    assert [line.split(" INFO ")[1].split()[0] for line in lines] == ["Rank", "one", "Rank", "two"]
    assert run_log_path(3) == tmp_path / "logs" / "rank_3.log"


def test_log_folder_is_made_by_the_first_message(tmp_path):
    get_run_logger(tmp_path / "new")
    note_in_run_log("this output_dir was refused")
    assert not (tmp_path / "new").exists()
    get_run_logger(tmp_path)
    for _ in range(2):  # by who raises it, and by who ends the process
        note_in_run_log("rank 1 could not start")
    assert (tmp_path / "logs" / "rank_0.log").read_text().count("ERROR rank 1 could not start") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_full_disk_is_reported_once(tmp_path, caplog):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").symlink_to("/dev/full")
    log = get_run_logger(tmp_path)
    log.info("one")
    log.info("two")
    (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert message.endswith("rank_0.log cannot be written (No space left on device): the run goes on without it.")


def test_log_folder_that_cannot_be_made_is_reported_once(tmp_path, caplog):
    (tmp_path / "logs").write_text("a file")
    log = get_run_logger(tmp_path)
    log.info("one")
    log.info("two")
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_warnings_and_errors_go_where_they_went_before(tmp_path):
    before = warnings.showwarning, sys.excepthook
    get_run_logger(tmp_path)
    get_run_logger(tmp_path)
    close_run_logger()
    close_run_logger()
    assert (warnings.showwarning, sys.excepthook) == before
    note_in_run_log("nobody listens")
    assert run_log_path(0) is None


def test_stacks_of_threads_are_written_to_the_log(tmp_path):
    get_run_logger(tmp_path).info("one")
    dump_stacks("It stands still.")
    dump_stacks_after(0.01)
    file = tmp_path / "logs" / "rank_0.log"
    while "Timeout" not in file.read_text():
        pass
    dump_stacks_after(3600)
    dump_stacks_after(None)
    now, later = file.read_text().split("Timeout")
    assert "ERROR It stands still." in now
    assert "in test_stacks_of_threads_are_written_to_the_log" in now
    assert "in test_stacks_of_threads_are_written_to_the_log" in later


def test_rank_zero_logs_and_once_messages_come_once(caplog, monkeypatch):
    logger = get_logger("INFO")
    with caplog.at_level(logging.INFO, logger="torchtune"):
        log_rank_zero(logger, "first rank")
        for _ in range(3):
            log_once(logger, "once and for all")
        monkeypatch.setenv("RANK", "1")
        log_rank_zero(logger, "second rank")
    assert [record.message for record in caplog.records] == ["first rank", "once and for all"]


def test_a_deprecated_class_stays_a_class():
    @deprecated("Use B.")
    class A:
        def __init__(self, x):
            self.x = x

    assert isinstance(A, type)
    with pytest.warns(FutureWarning, match=r"A is deprecated and will be removed\. Use B\."):
        assert A(3).x == 3


def test_a_deprecated_function_and_parameter():
    @deprecated()
    def f():
        return 1

    @deprecate_parameter("old", "Use new.")
    def g(new=0, old=None):
        return new

    with pytest.warns(FutureWarning, match="f is deprecated") as of_function:
        assert f() == 1
    assert g(2) == 2
    with pytest.warns(FutureWarning, match="old is deprecated for g") as of_parameter:
        g(2, 3)
    assert of_function[0].filename == of_parameter[0].filename == __file__, "the caller has to change the line"
