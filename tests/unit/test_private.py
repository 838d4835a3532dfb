"""Private directories: their permissions, and the removal of those of killed processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.private import private_directory, user_cache

HOLDER = (
    "import sys, pathlib; from services.private import private_directory\n"
    "with private_directory(pathlib.Path(sys.argv[1]), 'runahead-serve-') as path:\n"
    "    (path / 'frontend.json').write_text('a key')\n"
    "    print(path, flush=True)\n"
    "    sys.stdin.read()\n"
)


def holder(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that uses a private directory until its input ends. Return it and the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_directory_is_private_and_removed_afterwards(tmp_path: Path) -> None:
    with private_directory(tmp_path, "runahead-serve-") as path:
        (path / "frontend.json").write_text("a key")
        assert path.parent == tmp_path
        assert path.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_directory_of_a_killed_process_is_removed_and_that_of_a_running_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "runahead-else").mkdir()
    (running, used), (killed, left) = holder(tmp_path), holder(tmp_path)
    with running, killed:
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        assert left.is_dir()
        with private_directory(tmp_path, "runahead-serve-") as mine:
            assert {path.name for path in tmp_path.iterdir()} == {"runahead-else", used.name, mine.name}
        assert used.is_dir()
        running.stdin.close()
    assert os.listdir(tmp_path) == ["runahead-else"]


def test_forked_child_does_not_remove_the_directory(tmp_path: Path) -> None:
    ends = (
        "import os, sys, pathlib; from services.private import private_directory\n"
        "with private_directory(pathlib.Path(sys.argv[1]), 'runahead-serve-') as path:\n"
        "    if not (child := os.fork()):\n"
        "        sys.exit(0)\n"
        "    print(os.waitpid(child, 0)[1], path.is_dir())\n"
    )
    done = subprocess.run([sys.executable, "-c", ends, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "True"], done.stderr
    assert list(tmp_path.iterdir()) == []


def test_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    outside, base = tmp_path / "outside", tmp_path / "base"
    outside.mkdir()
    base.mkdir()
    (outside / "file").touch()
    (base / "runahead-serve-link").symlink_to(outside)
    with private_directory(base, "runahead-serve-"):
        assert (outside / "file").exists()


def test_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)
    assert user_cache() == Path("/nonexistent/runahead")
