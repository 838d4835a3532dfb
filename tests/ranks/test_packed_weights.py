"""The ranks of a group that starts again take their packed weights from files."""

from collections.abc import Callable
from pathlib import Path

from tests.integration.native.conftest import Family
from tests.ranks.group import GroupDriver
from tests.waiting import wait_until

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
            written = lambda: len(list((tmp_path / "weights").glob("*.packed"))) == 2  # noqa: E731
            wait_until(written, "each rank has written its own")
    assert found[0] == found[1] == found[2]
