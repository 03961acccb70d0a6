"""Connections between ranks tell a rank that was killed from a rank that has finished or is only slow."""

import json
import os
import socket
import time

import pytest
from torch.distributed import HashStore

from torchtune.supervision._heartbeats import Lifelines


@pytest.fixture
def ring():
    """Lifelines of three ranks, connected."""
    store = HashStore()
    ranks = [Lifelines(rank, 3, "test", "127.0.0.1") for rank in range(3)]
    for lifelines in ranks:
        lifelines.open(store)
    for lifelines in ranks:
        lifelines.connect(store)
    until(lambda: all(len(lifelines._lines) == 2 for lifelines in ranks), ranks)
    yield ranks
    for lifelines in ranks:
        lifelines.close(has_finished=True)


def until(condition, ranks):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        for lifelines in ranks:
            lifelines.poll()
        time.sleep(0.001)


def test_rank_that_ends_without_a_farewell_is_seen_by_both_neighbors(ring):
    ring[1].close(has_finished=False)
    neighbors = [ring[0], ring[2]]
    until(lambda: all(lifelines.cut_ranks for lifelines in neighbors), neighbors)
    assert [lifelines.cut_ranks for lifelines in neighbors] == [{1}, {1}]


def test_rank_that_has_finished_is_not_lost(ring):
    ring[1].close(has_finished=True)
    neighbors = [ring[0], ring[2]]
    until(lambda: all(len(lifelines._lines) == 1 for lifelines in neighbors), neighbors)
    assert [lifelines.cut_ranks for lifelines in neighbors] == [set(), set()]


def test_fork_of_a_rank_does_not_hide_its_end(ring):
    """As the processes that prepare rows."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent closes its end
        os._exit(0)
    ring[1].close(has_finished=False)
    neighbors = [ring[0], ring[2]]
    until(lambda: all(lifelines.cut_ranks for lifelines in neighbors), neighbors)
    os.close(writer)
    os.close(reader)
    assert os.waitpid(pid, 0)[1] == 0


def test_ranks_that_are_alive_are_not_reported_as_lost(ring):
    for lifelines in ring:
        lifelines.poll()
    assert [lifelines.cut_ranks for lifelines in ring] == [set(), set(), set()]


def test_connection_without_the_token_is_closed():
    store = HashStore()
    lifelines = Lifelines(0, 2, "test", "127.0.0.1")
    lifelines.open(store)
    host, port, token = json.loads(store.get("test/address/0"))
    for words in (b"GET / HTTP/1.1", b""):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(words)
        time.sleep(0.01)
        lifelines.poll()
    with socket.create_connection((host, port)) as neighbor:
        neighbor.sendall(bytes.fromhex(token))
        until(lambda: lifelines._lines, [lifelines])
        assert not lifelines.cut_ranks
    until(lambda: lifelines.cut_ranks == {1}, [lifelines])
    lifelines.close(has_finished=True)


def test_rank_that_cannot_be_reached_is_not_lost():
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    store.set("test/address/1", json.dumps(["127.0.0.1", free_port, "00"]))
    lifelines = Lifelines(0, 2, "test", "127.0.0.1")
    lifelines.open(store)
    lifelines.connect(store)
    lifelines.poll()
    assert not lifelines.cut_ranks
    lifelines.close(has_finished=False)
