"""Numbers with a suffix, as vLLM reads them: 4G, 1.5GiB, 8k."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?b)?", re.IGNORECASE)
_EXPONENTS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> object:
    """Return the number of a text with a suffix, any other value as it is. Raises: ValueError, for a text without one

    K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024; k, m, g, t and kB, MB, GB, TB are powers of 1000.
    """
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        if isinstance(value, str) and not value.strip().lstrip("+-").isdigit():
            raise ValueError("must be a number, such as 8192, 8K or 4G")
        return value
    number, letter, unit = match.groups()
    binary = letter.isupper() if unit is None else len(unit) == 2
    return round(Decimal(number) * (1024 if binary else 1000) ** _EXPONENTS[letter.lower()])


WITH_SUFFIX = BeforeValidator(parse_size)
Size = Annotated[int, WITH_SUFFIX]
"""An integer that may be written with a suffix."""
