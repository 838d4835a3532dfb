"""Sizes as people read them."""

import pytest

from services.units import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (15051 * 368640, "5.2 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_size(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
