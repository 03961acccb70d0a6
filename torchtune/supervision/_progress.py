"""The progress bar of a run."""

import os
import sys
from collections.abc import Mapping
from typing import IO, Any

from tqdm import tqdm

from torchtune.utils import ObserverGuard

# Metric -> name and format on the screen, most important first: the last ones are left out where the line is too short.
_SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "val_loss": ("val_loss", "{:.4f}"),
    "rewards/total": ("reward", "{:.3f}"),
    "val_rewards/total": ("val_reward", "{:.3f}"),
    "rewards/accuracies": ("accuracy", "{:.0%}"),
    "val_rewards/accuracies": ("val_accuracy", "{:.0%}"),
    "tokens_per_second_per_gpu": ("tok/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.0%}"),
}
_ON_TERMINAL = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_IN_FILE = "step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


class ProgressBar:
    """Shows step, total, loss, tokens per second and remaining time on rank 0.

    A terminal shows one line, with as many of the metrics as leave room for the bar; lines of the library's logger are
    printed above it. A log file or pipe gets a plain line every ``interval`` seconds and at the end.

    Args:
        total: optimizer steps of the run.
        initial: completed steps of a resumed run.
        file: output; stderr by default.
        interval: seconds between plain lines.

    Example:
        >>> with open(folder / "bar", "w") as file:
        ...     bar = torchtune.supervision.ProgressBar(total=2, file=file)
        ...     bar.advance(1)
        ...     bar.close()
    """

    def __init__(self, total: int, initial: int = 0, file: IO[str] | None = None, interval: float = 10.0) -> None:
        self._guard = ObserverGuard("progress bar")
        if file is None:
            file = sys.stderr

        def make_bar() -> _Bar:
            if file.isatty():  # redrawn in place
                options = {"file": file, "mininterval": 0.1, "bar_format": _ON_TERMINAL}
                if min(os.get_terminal_size(file.fileno())) > 0:
                    options["dynamic_ncols"] = True  # follow changes of the window's size
                else:  # some terminals report a size of 0
                    options.update(ncols=80, nrows=24)
            else:
                options = {"file": _Lines(file), "mininterval": interval, "bar_format": _IN_FILE}
            is_main = int(os.environ.get("RANK", "0")) == 0  # set by torchrun
            # miniters=1: every step may redraw the bar, and mininterval alone limits how often.
            return _Bar(total=total, initial=initial, disable=not is_main, miniters=1, unit="step", **options)

        self._bar = self._guard.call(make_bar)

    def __enter__(self) -> "ProgressBar":
        return self

    def update_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Show loss, reward, accuracy (also of validation), tokens per second and MFU; other metrics are ignored.

        Late metrics are shown when they are there.
        """
        if self._bar is None:
            return
        from torchtune.training import LateMetrics  # loads torch, which commands without a run do not need

        if isinstance(metrics, LateMetrics):
            metrics.when_settled(lambda: self._guard.call(lambda: self._show(metrics)))
        else:
            self._guard.call(lambda: self._show(metrics))

    def _show(self, metrics: Mapping[str, Any]) -> None:
        """Set the texts of the metrics, which the next redraw shows."""
        for name, (label, form) in _SHOWN.items():
            if name in metrics:
                self._bar.shown[label] = form.format(float(metrics[name]))

    def advance(self, step: int) -> None:
        """Set the number of completed steps, including steps before a resume."""
        if self._bar is not None:
            self._guard.call(lambda: self._bar.update(step - self._bar.n))

    def close(self) -> None:
        """Draw the final state and end the line."""
        if self._bar is not None:
            self._guard.call(self._bar.close)

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bar(tqdm):
    """tqdm without its monitor thread, which outlives the bar, and with as many metrics as fit.

    Attributes:
        shown: name and text of each metric.
    """

    monitor_interval = 0

    def __init__(self, **options: Any) -> None:
        self.shown: dict[str, str] = {}
        super().__init__(**options)

    @property
    def format_dict(self) -> dict[str, Any]:
        """What a line is made of."""
        values = super().format_dict
        labels = [label for label, _ in _SHOWN.values() if label in self.shown]
        while True:  # leave out the last metrics until the line fits
            values["postfix"] = ", ".join(f"{label}={self.shown[label]}" for label in labels)
            # Without a number of columns, the bar has ten.
            shortest = self.format_meter(**{**values, "ncols": None})
            if not labels or values["ncols"] is None or len(shortest) <= values["ncols"]:
                return values
            labels.pop()


class _Lines:
    """File that gets one line per redraw."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        text = text.strip("\r\n \x1b[A")  # what moves the cursor of a terminal
        if text:
            self._file.write(text + "\n")

    def flush(self) -> None:
        self._file.flush()
