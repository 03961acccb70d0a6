"""Lifelines: connections between ranks that end with a process, even if it is killed."""

import json
import os
import secrets
import socket
import sys
import weakref
from typing import TYPE_CHECKING

from torchtune.utils import get_logger

if TYPE_CHECKING:
    from torch.distributed import Store

_FAREWELL = b"."  # sent by a rank that has finished
_CONNECT_SECONDS = 5.0
# A machine that vanishes closes nothing. Its neighbors probe it after a minute without traffic, and then every 20
# seconds; it is gone after six probes without a reply.
_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}


class Lifelines:
    """Connections of this rank to the next and to the previous rank, which form a ring.

    NCCL does not notice when a rank is killed, and a rank without a heartbeat may only be stopped. But the operating
    system closes the connections of every process that ends.

    Nothing here waits for another rank or raises an error. Without a connection, for example because of a firewall, a
    killed rank remains unnoticed until the timeout of the watchdog.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        prefix: prefix of keys in the store.
        host: address of this machine.

    Attributes:
        cut_ranks: neighbors whose connection ended without a farewell.
    """

    def __init__(self, rank: int, world_size: int, prefix: str, host: str) -> None:
        self._next_rank = (rank + 1) % world_size
        self._previous_rank = (rank - 1) % world_size
        self._host = host
        self._own_key = f"{prefix}/address/{rank}"
        self._next_key = f"{prefix}/address/{self._next_rank}"
        self._token = secrets.token_bytes(16)  # known to ranks, not to others that connect to an open port
        self._listener: socket.socket | None = None
        self._callers: list[socket.socket] = []  # have not sent the token so far
        self._is_next_called = False
        self._lines: dict[socket.socket, int] = {}
        self.cut_ranks: set[int] = set()
        _all_lifelines.add(self)

    def open(self, store: "Store") -> None:
        """Publish the address at which the previous rank connects."""
        try:
            if socket.has_dualstack_ipv6():
                self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            else:
                self._listener = socket.create_server(("", 0))
        except OSError as error:
            get_logger().debug(f"No port for the previous rank: {error}")
            return
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        store.set(self._own_key, json.dumps([self._host, port, self._token.hex()]))

    def connect(self, store: "Store") -> None:
        """Connect to the next rank, once it has published its address."""
        if self._is_next_called or not store.check([self._next_key]):
            return
        self._is_next_called = True
        host, port, token = json.loads(store.get(self._next_key))
        try:
            line = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            line.sendall(bytes.fromhex(token))
        except OSError as error:
            get_logger().debug(f"No connection to rank {self._next_rank} at {host}:{port}: {error}")
            return
        self._keep(line, self._next_rank)

    def look(self) -> None:
        """Accept the connection of the previous rank, and find the connections that have ended."""
        self._accept()
        for line, rank in list(self._lines.items()):
            message = _receive(line, 1)
            if message is None:
                continue
            if message != _FAREWELL:
                self.cut_ranks.add(rank)
            line.close()
            del self._lines[line]

    def close(self, *, has_finished: bool) -> None:
        """Close the connections, with a farewell if this rank has finished."""
        for line in self._lines:
            if has_finished:
                try:
                    line.send(_FAREWELL)
                except OSError as error:  # the neighbor was faster
                    get_logger().debug(f"No farewell to a neighbor: {error}")
            line.close()
        self._lines.clear()
        self._stop_listening()

    def _accept(self) -> None:
        """Accept a caller, and keep it as the previous rank if it sends the token."""
        if self._listener is None:
            return
        try:
            caller, _ = self._listener.accept()
        except OSError:  # nobody has called, or the caller has ended
            pass
        else:
            caller.setblocking(False)
            self._callers.append(caller)
        for caller in list(self._callers):
            token = _receive(caller, len(self._token))
            if token is None:
                continue
            self._callers.remove(caller)
            if token == self._token:
                self._keep(caller, self._previous_rank)
                self._stop_listening()
                return
            caller.close()

    def _keep(self, line: socket.socket, rank: int) -> None:
        """Keep a connection to a neighbor, and let the kernel probe it."""
        line.setblocking(False)
        if sys.platform == "linux":
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _PROBES.items():
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._lines[line] = rank

    def _stop_listening(self) -> None:
        """Close the port, and the connections that have sent no token."""
        for caller in self._callers:
            caller.close()
        self._callers.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


_all_lifelines: weakref.WeakSet[Lifelines] = weakref.WeakSet()  # of this process


def _close_in_child() -> None:
    """Close a fork's copies of the connections, which would outlive the rank."""
    for lifelines in list(_all_lifelines):
        lifelines.close(has_finished=False)


os.register_at_fork(after_in_child=_close_in_child)


def _receive(line: socket.socket, size: int) -> bytes | None:
    """Return what has arrived: None if nothing has, no bytes if the connection has ended."""
    try:
        return line.recv(size)
    except BlockingIOError:
        return None
    except OSError:  # reset by the other side, or no reply to probes
        return b""
