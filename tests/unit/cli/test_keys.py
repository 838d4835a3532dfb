"""Keys in a file."""

from pathlib import Path

import pytest

from services.cli.keys import with_keys
from services.cli.settings import ConfigurationError
from services.config import FrontendConfig
from tests.unit.cli.test_commands import runahead


def test_keys_of_the_file_join_those_given(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n\n  third \n")
    config = with_keys(FrontendConfig(api_key=["first"], api_key_file=str(file)))
    assert (config.api_key, config.api_key_file) == (["first", "second", "third"], None)
    assert with_keys(config) == config


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no key; write one per line"),
        (b" \n\n", "holds no key; write one per line"),
        (b"\xff\xfe\x00", "it is not text"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_without_keys_opens_the_api_to_nobody(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=reason):
        with_keys(FrontendConfig(api_key_file=str(file)))
    for service in ("serve", "frontend"):
        done = runahead(service, "--api-key-file", str(file), "--port", "0")
        assert done.returncode in (1, 2)
        assert f"--api-key-file: {'cannot read ' if 'holds' not in reason else ''}{file}" in done.stderr
