"""Rows of a part that are written as soon as each is measured, so that a part that was stopped goes on behind them."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_json(file: Path, content: object) -> None:
    """Write a file that is complete whenever it exists."""
    written = file.with_name(f"{file.name}.new")
    written.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(written, file)


class SavedRows:
    """`file` exists from the first row until the part is complete."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: list[Row] = json.loads(file.read_text()) if file.is_file() else []

    def measure(self, case: Row, measured: Callable[[], Sequence[Row]]) -> None:
        """Add the rows of a case, unless there are some already. Each has the items of the case."""
        if any(case.items() <= row.items() for row in self.rows):
            return
        self.rows += [case | row for row in measured()]
        write_json(self._file, self.rows)

    def complete(self) -> None:
        self._file.unlink(missing_ok=True)
