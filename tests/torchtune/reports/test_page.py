"""The page: one file that needs no network and runs nothing, whatever the rows say."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from tests.torchtune.reports.folders import START, ended, measured, write_run
from torchtune.checkpoints import MARKER
from torchtune.reports import RunFolder, write_report
from torchtune.utils import UserError

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


class Tags(HTMLParser):
    """The tags of a page and their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def hostile_events():
    sample = {"row": 0, "tokens": 9, "trained": 2, "pieces": [[EVIL, False], [EVIL, True]]}
    data = {"dataset": {"rows": 3, "examples": 3, "digest": EVIL, "samples": [sample]}}
    answer = {"prompt": EVIL, "expected": EVIL, "answer": EVIL}
    return [
        START | {"data": data, "config": EVIL, "device": EVIL, "changed": {EVIL: [EVIL, EVIL]}, "processes": 1},
        measured("before", {"a": 1.0}, answers=[answer]),
        measured("after", {"a": 0.5}, answers=[answer]),
        ended("has failed", error="ValueError", sentence=EVIL),
    ]


def test_hostile_text_is_shown_and_never_run(tmp_path):
    run = write_run(
        tmp_path / "run", hostile_events(), [{"step": 1, "loss": 1.0, f"loss/{EVIL}": 2.0}], model={EVIL: EVIL}
    )
    (run / "skipped_steps.jsonl").write_text(json.dumps({"step": 1, "reason": EVIL, "rows": [{"row": EVIL}]}) + "\n")
    (run / "skipped_rows.jsonl").write_text(json.dumps({"source": EVIL, "row": 1, "reason": EVIL}) + "\n")
    page = Tags(write_report(RunFolder(run)).read_text())
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "embed", "link", "a", "form"}
    for _, attributes in page.tags:
        assert not [attribute for attribute in attributes if attribute.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") >= 12, "every text is shown as it is"
    assert "{{ 7 * 7 }}" in page.text


def test_page_loads_nothing_from_elsewhere(tmp_path):
    run = write_run(tmp_path / "run", [START, ended()], [{"step": 1, "loss": 1.0}])
    page = write_report(RunFolder(run)).read_text()
    assert not re.search(r"https?:|url\(|@import|src=|href=", page)
    (policy,) = [attributes["content"] for tag, attributes in Tags(page).tags if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'")


def test_a_run_ends_after_all_other_events(tmp_path):
    events = [START, ended("was stopped", 4), START | {"step": 4}, ended()]
    run = write_run(tmp_path / "run", events, [{"step": 1, "loss": 1.0}])
    (run / "skipped_steps.jsonl").write_text(json.dumps({"step": 3, "reason": "spike"}) + "\n")
    (run / "epoch_0").mkdir()
    (run / "epoch_0" / MARKER).write_text(json.dumps({"saves": 1, "resumable": False, "files": {}, "crc32": {}}))
    listed = write_report(RunFolder(run)).read_text().partition("<h2>Events</h2>")[2].partition("</table>")[0]
    kinds = re.findall(r"<td>(started|resumed|skipped|saved|ended)</td>", listed)
    assert kinds == ["started", "ended", "resumed", "skipped", "saved", "ended"]


def test_page_of_a_long_run_stays_small(tmp_path):
    names = [f"loss/source {i}" for i in range(60)]
    metrics = [{"step": step, "loss": 1 / step, **dict.fromkeys(names, 0.5)} for step in range(1, 500)]
    run = write_run(tmp_path / "run", [START, ended()], metrics)
    (run / "skipped_steps.jsonl").write_text(
        "".join(json.dumps({"step": i, "reason": "x" * 5000, "rows": [{"row": i}] * 50}) + "\n" for i in range(400))
    )
    path = write_report(RunFolder(run))
    assert path.stat().st_size < 500_000
    assert "54 more, in report.json" in path.read_text()
    assert "350 more, in skipped_steps.jsonl" in path.read_text()


def test_axes_have_a_few_round_numbers(tmp_path):
    metrics = [{"step": step, "loss": float(step)} for step in (1, 5, 9)]
    page = write_report(RunFolder(write_run(tmp_path / "run", [START, ended()], metrics))).read_text()
    chart = page.partition("<svg")[2].partition("</svg>")[0]
    ticks_of_loss = ["2.5", "5", "7.5"]
    ticks_of_steps = ["2", "4", "6", "8"]
    assert re.findall(r">([\d.]+)</text>", chart) == [*ticks_of_loss, *ticks_of_steps]


def test_numbers_that_are_not_finite_are_marked_and_are_null_in_json(tmp_path):
    metrics = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0}]
    path = write_report(RunFolder(write_run(tmp_path / "run", [START, ended()], metrics)), price_per_hour=40.0)
    assert "not finite: 1" in path.read_text()
    facts = json.loads(path.with_name("report.json").read_text(), parse_constant=pytest.fail)
    assert facts["curves"]["loss"] == [[1, 1.0], [2, None], [3, 2.0]]
    assert facts["cost"] == 1.0  # 90 seconds at 40 an hour


@pytest.mark.parametrize("metrics", [[], [{"step": 4}], [{"step": 1, "loss": None}]])
def test_run_without_metrics_has_a_page(metrics, tmp_path):
    assert "is of an earlier release" in write_report(RunFolder(write_run(tmp_path / "a", [], metrics))).read_text()
    path = write_report(RunFolder(write_run(tmp_path / "b", [START], metrics, metric_logger=None)))
    assert "page shows it so far" in path.read_text()


def test_secrets_of_settings_are_not_on_the_page(tmp_path):
    token = "hf_" + "a1B2" * 8
    run = write_run(tmp_path / "run", [START | {"changed": {"x": [None, token]}}], dataset={"source": token})
    path = write_report(RunFolder(run))
    assert token not in path.read_text()
    assert token not in path.with_name("report.json").read_text()


def test_a_full_disk_leaves_the_former_page(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [START])
    (run / "report.html").write_text("before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_report(RunFolder(run))
    assert (run / "report.html").read_text() == "before"


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium: set CHROMIUM to a browser")
@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (390, False)])
def test_page_fits_the_window_of_a_browser(width, dark, tmp_path):
    """The page is as wide as its window: a probe page frames it and reports its width."""
    metrics = [{"step": step, "loss": 1 / step, "lr": 0.1} for step in range(1, 60)]
    path = write_report(RunFolder(write_run(tmp_path / "run", hostile_events(), metrics)))
    page = path.read_text()
    shot = tmp_path / "shot.png"
    says = "document.documentElement.scrollWidth+' '+getComputedStyle(document.body).backgroundColor"
    probe = f"<script>document.title={says}</script>"
    page = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", f"{probe}</body>")
    (tmp_path / "probe.html").write_text(page)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += [f"--window-size={width},900", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    run = [BROWSER, *flags]
    dumped = subprocess.run([*run, "--dump-dom", f"file://{tmp_path / 'probe.html'}"], capture_output=True, text=True)
    wide, colour = re.search(r"<title>(\d+) rgb\((\d+)", dumped.stdout).groups()
    assert int(wide) <= max(width, 500), "chromium's windows are at least 500 wide"
    assert (int(colour) < 60) == dark
    subprocess.run([*run, f"--screenshot={shot}", f"file://{path}"], capture_output=True, check=True)
    assert shot.stat().st_size > 10_000
