"""``tune compare`` and ``tune report`` on folders of runs."""

import json

import pytest

from tests.torchtune.reports.folders import ROWS, SETTINGS, START, ended, lines, measured, write_best, write_run


def make(folder, *, shift=0.0, noise=0.0, start=None, rate=1.0, **settings):
    after = {name: value + shift + (-1) ** i * noise for i, (name, value) in enumerate(ROWS.items())}
    metrics = [
        {
            "step": i,
            "loss": 3.0 + shift,
            "trained_tokens": 10 * i,
            "processed_tokens": 20 * i,
            "elapsed_seconds": i / rate,
        }
        for i in range(1, 5)
    ]
    return write_run(folder, [START | (start or {}), measured("after", after), ended()], metrics, **settings)


def test_comparison_lists_only_differences(tune, tmp_path):
    first = make(tmp_path / "one", output_dir="a", epochs=1, seed=4, start={"code": {"torch": "2.11"}})
    second = make(
        tmp_path / "two", output_dir="b", epochs=2, seed=4, shift=-0.5, rate=2.0, start={"code": {"torch": "2.13"}}
    )
    done = tune("compare", first, second)
    assert done.code == 0
    listed = {
        line.split()[0]: line.split()[1:]
        for line in done.out.partition("what differs")[2].partition("\n\n")[0].splitlines()[1:]
    }
    assert listed == {"epochs": ["1", "2"], "code.torch": ["2.11", "2.13"]}
    assert "  two: loss after training -0.5 (95 % interval -0.5 to -0.5), 8 rows: better" in done.out
    assert done.out.split("40 trained tokens")[1].split()[:2] == ["3.0000", "2.5000"]
    assert done.out.split("  2 seconds")[1].split()[:2] == ["3.0000", "2.5000"], "the time that both have"


def test_differences_within_noise_are_called_noise_and_both_curves_drawn(tune, tmp_path):
    first = make(tmp_path / "one")
    second = make(tmp_path / "two", noise=0.3, rate=0.25)
    done = tune("compare", first, second, "--html", tmp_path / "page.html")
    assert done.code == 0
    assert "8 rows: same within noise" in done.out
    assert done.out.split("  2 seconds")[1].split()[:2] == ["3.0000", "\u2013"], "the second has made no step yet"
    assert "No setting, data or code differs." in done.out
    page = (tmp_path / "page.html").read_text()
    assert page.count("<polyline") == 4
    assert "same within noise" in page


def test_validations_are_drawn_and_the_best_checkpoints_named(tune, tmp_path):
    runs = [make(tmp_path / name) for name in ("one", "two")]
    write_best(runs[0], 2, 2.25)
    for run in runs:
        with (run / "logs" / "log.jsonl").open("a") as log:
            log.write(lines([{"step": step, "val_loss": 2.5 - step / 8} for step in (2, 4)]))
    done = tune("compare", *runs, "--html", tmp_path / "page.html")
    assert done.code == 0
    assert done.out.split("best checkpoint")[1].split()[:5] == ["2.25", "at", "step", "2", "none"]
    page = (tmp_path / "page.html").read_text()
    assert "val_loss over trained tokens" in page
    assert "val_loss over seconds" in page
    assert page.count("<polyline") == 8
    assert "2.25 at step 2" in page


def test_different_losses_are_not_compared(tune, tmp_path):
    loss = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
    first = make(tmp_path / "one")
    second = make(tmp_path / "two", recipe="dpo", loss=loss, shift=1.0)
    done = tune("compare", first, second)
    assert done.code == 0
    assert (
        "their units differ: lora_finetune_single_device with LinearCrossEntropyLoss, dpo with DPOLoss.\n" in done.out
    )
    assert "no row was measured in both" in done.out


def test_scores_of_the_same_rows_are_paired(tune, tmp_path):
    runs = [make(tmp_path / name) for name in ("one", "two")]
    for run, right in zip(runs, (3, 17), strict=True):
        (run / "eval").mkdir()
        answers = [{"line": i, "scores": {"exact": float(i < right)}} for i in range(20)]
        (run / "eval" / "held.run.jsonl").write_text(lines(answers))
        (run / "eval" / "held.results.json").write_text(json.dumps({"models": [{"answers": "held.run.jsonl"}]}))
    done = tune("compare", *runs)
    (line,) = [line for line in done.out.splitlines() if "exact on held" in line]
    assert line.startswith("  two: exact on held +0.7 (95 % interval +0.")
    assert line.endswith("20 rows: better")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["compare", "{one}"], "compare: give two runs or more, each once."),
        (["compare", "{one}", "{one}"], "compare: give two runs or more, each once."),
        (["compare", "{one}", "{none}"], "has no torchtune_config.yaml: give the output_dir of a run."),
        (["report", "{none}"], "has no torchtune_config.yaml: give the output_dir of a run."),
        (["report", "{one}", "--price-per-hour", "-1"], "--price-per-hour is -1.0: it must be at least 0."),
    ],
)
def test_invalid_runs_are_refused_in_one_sentence(arguments, error, tune, tmp_path):
    run_folder = make(tmp_path / "one")
    done = tune(*[word.format(one=run_folder, none=tmp_path / "none") for word in arguments])
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.endswith(f"{error}\n")
    assert done.err.count("\n") == 1


def test_killed_run_has_a_report(tune, tmp_path):
    run = write_run(tmp_path / "run", [START, measured("before", ROWS)], [{"step": 3, "loss": 2.5}], seed=SETTINGS)
    done = tune("report", run)
    assert done.code == 0
    assert "verdict     unfinished: the run was killed at step 3 of 20; the loss went from 2.5 to 2.5; " in done.out
    assert "; 8 rows were measured before training, none of them after it\n" in done.out
    assert "or is going on on another machine" in (run / "report.html").read_text()
