"""Addresses of engines: where the scheduler of each is reached, and with which key."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineAddress:
    name: str
    """Name in metrics, logs and commands, unique among the engines of a frontend."""
    endpoint: str
    """Endpoint of its scheduler for frontends."""
    public_key: str = ""
    """Public key (z85) of its scheduler; "": that of the directory with this frontend's keys."""


def numbered(endpoints: list[str]) -> list[EngineAddress]:
    """Return addresses whose names are 0, 1, 2 ..."""
    return [EngineAddress(str(index), endpoint) for index, endpoint in enumerate(endpoints)]
