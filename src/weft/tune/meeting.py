"""Where the processes of a split job meet: a store on loopback, new for every attempt."""

from __future__ import annotations

import socket
import sys
from typing import Any

HOST = "127.0.0.1"


def open_meeting(world: int) -> tuple[dict[str, str], Any]:
    """The variables of torchrun without the ranks, and the store that they lead to, which must be kept."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }, store
