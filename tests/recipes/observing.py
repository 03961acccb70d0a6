"""Observers that fail when they are told to, and a tokenizer that can do little: named in the YAML of the tests."""

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

import torch

from torchtune.tokenizers import hf_tokenizer
from torchtune.training.metric_logging import MetricLoggerInterface


class FailingLogger(MetricLoggerInterface):
    """Fails at its start, at every step or at its end, and draws a random number each time.

    Args:
        when: ``"start"``, ``"middle"`` or ``"end"``.
    """

    def __init__(self, when: str) -> None:
        self.when = when
        self.fail("start")

    def fail(self, moment: str) -> None:
        torch.rand(1)
        if self.when == moment:
            raise ConnectionResetError(f"no connection at the {moment}")

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        self.fail("middle")

    def close(self) -> None:
        self.fail("end")


class ServiceLogger(MetricLoggerInterface):
    """Writes to a process of its own, which ends with the run at a signal after ``step``, as under a scheduler."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.service = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        if step == self.step:
            self.service.terminate()
            self.service.wait()
            os.kill(os.getpid(), signal.SIGTERM)
        self.service.stdin.write(f"{step}\n".encode())
        self.service.stdin.flush()

    def close(self) -> None:
        self.service.stdin.close()


class PlainTokenizer:
    """Encodes and decodes, and has no ``stop_tokens``; with ``rank``, decoding fails on that rank only."""

    def __init__(self, path: str, max_seq_len: int | None = None, rank: int | None = None) -> None:
        self._tokenizer = hf_tokenizer(path, max_seq_len=max_seq_len)
        self.max_seq_len = max_seq_len
        self._rank = rank
        self.vocab_size = self._tokenizer.vocab_size
        if rank is not None:
            self.stop_tokens = self._tokenizer.stop_tokens

    def __call__(self, sample: Any, inference: bool = False) -> Any:
        return self._tokenizer(sample, inference)

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        if self._rank == int(os.environ.get("RANK", "0")):
            raise UnicodeError("no text for these tokens")
        return self._tokenizer.decode(tokens, **kwargs)
