"""The meeting point of stages that share one machine: a store that listens on loopback alone, new at every start."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from weft.pipeline.parent import ATTEMPT, prefix

BACKEND = "weft-loopback"
HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """A rendezvous of one machine for torch elastic, whose own ones listen on every interface.

    `on_start(attempt)` is called before each start of all stages and `on_round()` at every look at stages that all
    live; what they raise ends the launch. `store` is the one of the newest start. A new server at each start is what
    torch expects of a rendezvous: keys of `init_process_group` bear no number of the attempt.
    """

    def __init__(self, run_id: str, on_start: Callable[[int], None], on_round: Callable[[], None]) -> None:
        self.store: Store | None = None
        self.attempts = 0
        self._run_id = run_id
        self._on_start = on_start
        self._on_round = on_round

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._on_start(self.attempts)
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        server = TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
        # Elastic sets these in a stage as well, but in a spawned one only once the user's script is imported.
        os.environ.update({"MASTER_ADDR": HOST, "MASTER_PORT": str(port), ATTEMPT: str(self.attempts)})
        self.store = PrefixStore(prefix(self.attempts), server)
        self.attempts += 1
        return RendezvousInfo(PrefixStore("elastic", server), 0, 1, RendezvousStoreInfo(HOST, port))

    def num_nodes_waiting(self) -> int:
        self._on_round()
        return 0

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def _given(parameters: RendezvousParameters) -> RendezvousHandler:
    handler: RendezvousHandler = parameters.get("handler")
    return handler


rendezvous_handler_registry.register(BACKEND, _given)
