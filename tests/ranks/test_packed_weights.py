"""The ranks of a group that starts again take their packed weights from files."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.native.conftest import Family
from tests.ranks.group import GroupDriver

PROMPT = [5, 9, 201, 17, 3, 3, 88]


def test_two_ranks_start_again_with_the_same_tokens_and_digests(
    make_model: Callable[[str], Family], start: Callable[..., GroupDriver], tmp_path: Path
) -> None:
    path, found = make_model("untied-biased").path, []
    for config in ({"weights_cache_dir": "none"}, *[{"weights_cache_dir": str(tmp_path / "weights")}] * 2):
        group = start(path, 2, 1, **config)
        request = group.add(PROMPT)
        group.generate([request], 8)
        found.append((request.output, [each.contents for each in group.runner.loaded]))
        if config["weights_cache_dir"] != "none":
            while len(list((tmp_path / "weights").glob("*.packed"))) < 2:  # each rank writes its own
                time.sleep(0.01)
    assert found[0] == found[1] == found[2]
