"""What only watches a run may fail: it says so once, and the run is the one without it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.runs import run_main
from torchtune.checkpoints import complete_directories

FULL = "full_finetune_single_device"
SHORT = {"max_steps_per_epoch": 3, "log_level": "INFO"}


def logger(when):
    return {"_component_": "tests.recipes.observing.FailingLogger", "when": when}


def weights(output_dir):
    return load_file(complete_directories(output_dir)[-1] / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def events(output_dir):
    return [json.loads(line) for line in (output_dir / "logs" / "run.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run whose observers work, and the folder of its inputs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output_dir = run_main(FULL, folder, **SHORT)
    assert code == 0
    return folder, weights(output_dir)


@pytest.mark.parametrize("when", ["start", "middle", "end"])
def test_a_logger_that_fails_ends_no_run_and_changes_no_weight(when, undisturbed, caplog):
    folder, expected = undisturbed
    code, output_dir = run_main(FULL, folder, metric_logger=logger(when), **SHORT)
    assert code == 0
    assert same(weights(output_dir), expected)
    warnings = [record.getMessage() for record in caplog.records if "metric_logger" in record.getMessage()]
    assert len(warnings) == 1
    assert f"failed (ConnectionResetError: no connection at the {when}): the run goes on without it." in warnings[0]
    assert (output_dir / "torchtune_config.yaml").exists()


def test_a_profile_that_cannot_be_written_ends_no_run(undisturbed, caplog):
    folder, expected = undisturbed
    path = str(folder / "profile")
    profiler = {
        "_component_": "torchtune.training.setup_torch_profiler",
        "enabled": True,
        "output_dir": path,
        **{"wait_steps": 0, "warmup_steps": 1, "active_steps": 1, "num_cycles": 0},
    }
    # The folder turns into a file between set-up and the end of the first window.
    begin = "        with (\n            control,\n"
    changes = {begin: f"        __import__('os').rmdir({path!r}); open({path!r}, 'w').close()\n{begin}"}
    code, output_dir = run_main(FULL, folder, changes, profiler=profiler, **SHORT)
    assert code == 0
    assert same(weights(output_dir), expected)
    assert sum(message.startswith("profiler failed (") for message in caplog.messages) == 1


def test_a_service_that_is_killed_with_the_run_leaves_a_checkpoint_and_the_code_to_requeue(undisturbed, caplog):
    folder, _ = undisturbed
    service = {"_component_": "tests.recipes.observing.ServiceLogger", "step": 2}
    code, output_dir = run_main(FULL, folder, metric_logger=service, log_level="INFO")
    assert code == 75
    # The signal arrives after the ranks have agreed on step 2, so that one process saves there.
    (saved,) = complete_directories(output_dir)
    assert (saved / "state").is_dir()
    assert "metric_logger ServiceLogger failed (BrokenPipeError: [Errno 32] Broken pipe)" in caplog.text


def test_a_tokenizer_without_stop_tokens_has_no_answers_in_the_report(undisturbed, caplog):
    folder, expected = undisturbed
    tokenizer = {"_component_": "tests.recipes.observing.PlainTokenizer", "path": str(folder / "checkpoint")}
    code, output_dir = run_main(FULL, folder, tokenizer={**tokenizer, "max_seq_len": 128}, **SHORT)
    assert code == 0
    assert same(weights(output_dir), expected)
    missing = "The report has no answers: the tokenizer, PlainTokenizer, has no stop_tokens."
    assert caplog.messages.count(missing) == 1
    before = next(event for event in events(output_dir) if event.get("when") == "before")
    assert before["answers"] == []
    assert all(value > 0 for value in before["values"].values()), "the losses do not need them"


def test_a_loss_that_only_trains_is_not_measured(undisturbed, caplog):
    folder, expected = undisturbed
    device = "        batch = batch.to(self.device, non_blocking=True)\n"
    changes = {device: f"        assert torch.is_grad_enabled(), 'it only trains'\n{device}"}
    code, output_dir = run_main(FULL, folder, changes, **SHORT)
    assert code == 0
    assert same(weights(output_dir), expected)
    assert sum("report: measurement failed (AssertionError: it only trains" in text for text in caplog.messages) == 1
    assert "The run has finished." in caplog.text


def test_observers_that_fail_on_one_of_two_ranks_are_left_out_on_both(tmp_path, forker):
    tokenizer = "tests.recipes.observing.PlainTokenizer"
    run = forker.run_on_two(
        "full_finetune_distributed",
        tmp_path,
        metric_logger=logger("middle"),
        tokenizer__rank=1,
        tokenizer___component_=tokenizer,
        max_steps_per_epoch=2,
        log_level="INFO",
    )
    assert run.said.count("failed (ConnectionResetError: no connection at the middle)") == 1
    assert run.said.count("report: answers failed (") == 1
    assert "failed on another rank" in run.said, "rank 0 has its own answers, and drops them"
    assert {event["when"] for event in events(run.output_dir) if event["event"] == "measured"} == {"before", "after"}
