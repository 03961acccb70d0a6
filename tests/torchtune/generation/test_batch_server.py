"""The server of batches in a thread, in one process; ``ranks.py`` and the tests of ``tune serve`` have it in others."""

import gc
import threading
import weakref
from contextlib import closing

import torch

from torchtune.generation import BatchServer, Job
from torchtune.models import Description, build

_TINY = Description(
    vocab_size=29, num_layers=2, embed_dim=16, intermediate_dim=24, max_seq_len=64, num_heads=4, num_kv_heads=2
)


def test_finished_jobs_are_forgotten_while_others_run():
    """A batch that jobs join again and again never ends: what it keeps of each would fill the memory."""
    torch.manual_seed(0)
    model = build(_TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    checks = []  # of the long job: when it is admitted, then before each of its tokens
    resume = threading.Event()

    def wait_at_the_third_token():
        checks.append(None)
        if len(checks) == 4:
            resume.wait(60)
        return False

    short = Job("tiny", [3, 1, 4], limit=2, num_top=2)
    long = Job("tiny", [2, 6], limit=5, has_left=wait_at_the_third_token)
    with closing(BatchServer({"tiny": model}, stop_tokens=[], max_sequences=2)) as server:
        assert server.submit(short, long)
        assert len(list(short)) == 2
        reference = weakref.ref(short)
        del short
        gc.collect()
        is_forgotten = reference() is None
        resume.set()
        assert len(list(long)) == 5
    assert is_forgotten
