"""API keys from a file."""

import re
from pathlib import Path

import pytest

from services.cli.preflight import with_keys
from services.cli.settings import ConfigurationError
from services.config import FrontendConfig
from tests.unit.cli.command import run_command, run_process


def test_keys_of_the_file_are_added_to_the_others(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n\n  third \n")
    config = with_keys(FrontendConfig(api_key=["first"], api_key_file=str(file)))
    assert (config.api_key, config.api_key_file) == (["first", "second", "third"], None)
    assert with_keys(config) == config


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "contains no key; write one per line"),
        (b" \n\n", "contains no key; write one per line"),
        (b"\xff\xfe\x00", "it is not text"),
        ("sesame…".encode(), "a key has characters that clients cannot send; use printable ASCII"),
        (None, "No such file or directory"),
    ],
)
def test_file_without_keys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, reason: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=reason):
        with_keys(FrontendConfig(api_key_file=str(file)))
    done = run_command(capsys, "serve", "--api-key-file", str(file), "--port", "0")
    assert (done.status, done.stdout) == (2, "")
    assert re.search(reason, done.stderr)


def test_frontend_does_not_start_without_the_keys_of_its_file(tmp_path: Path) -> None:
    done = run_process("frontend", "--api-key-file", str(tmp_path / "missing"), "--port", "0")
    assert done.status == 1
    assert f"--api-key-file: cannot read {tmp_path / 'missing'}" in done.stderr
