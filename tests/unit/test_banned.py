"""Calls that would unpickle. The linter bans modules and functions by name, but no methods of objects."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHODS = {"recv_pyobj", "send_pyobj"}
"""Methods of ZeroMQ's sockets."""


def pickling_calls(source: str) -> list[int]:
    """Return the lines that name a banned method, or allow NumPy to unpickle."""
    found = []
    if not any(name in source for name in (*METHODS, "allow_pickle")):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            found.append(node.lineno)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source", ["socket.recv_pyobj()", "read = socket.recv_pyobj", "np.load(file, allow_pickle=True)"]
)
def test_pickling_calls_are_found(source: str) -> None:
    assert pickling_calls(source) == [1]


def test_no_service_unpickles() -> None:
    files = [file for folder in ("protocol", "services") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert {str(file): lines for file in files if (lines := pickling_calls(file.read_text()))} == {}
