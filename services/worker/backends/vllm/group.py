"""The process group that vLLM's own groups of ranks are made from, over the listening socket of rank 0.

vLLM takes the group that is there. So nobody has to agree on a free port, and ranks that do not come are waited for
no longer than anywhere else in this project.
"""

import socket
from typing import Any

from torch import distributed

from protocol.membership import Assignment
from services.worker.ranks import JOIN_TIMEOUT, STEP_TIMEOUT
from services.worker.runner import RanksLost

_c10d: Any = distributed  # its stubs lack most of what is used here


def join(assignment: Assignment, listener: socket.socket | None) -> str:
    """Connects this rank with the others, whose listening socket it gives up. Returns vLLM's name of the group.

    Raises: RanksLost, when the others do not come.
    """
    try:
        store = _store(assignment, listener)
        _c10d.init_process_group(
            "gloo", store=store, rank=assignment.rank, world_size=assignment.world_size, timeout=STEP_TIMEOUT
        )
    except RuntimeError as error:
        raise RanksLost(f"rank {assignment.rank} cannot reach the others: {error}") from error
    finally:
        if listener is not None:
            listener.close()
    return f"tcp://{assignment.rendezvous or 'alone'}"


def _store(assignment: Assignment, listener: socket.socket | None) -> Any:
    if assignment.world_size == 1:
        return _c10d.HashStore()
    host, _, port = assignment.rendezvous.rpartition(":")
    if assignment.rank:
        return _c10d.TCPStore(
            host, int(port), assignment.world_size, False, JOIN_TIMEOUT, wait_for_workers=False
        )
    if listener is None:
        raise ValueError("rank 0 needs the socket it registered with")
    return _c10d.TCPStore(
        host, int(port), assignment.world_size, True, JOIN_TIMEOUT,
        wait_for_workers=False, master_listen_fd=listener.detach(),
    )  # fmt: skip
