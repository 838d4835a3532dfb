"""Hosts that are network namespaces of this machine, joined by a bridge: each has an address, a name, processes and a
/tmp of its own."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

RUN = f"rh{os.getpid()}"
"""Begin of all names: several runs of the tests may share a machine."""
NETWORK = f"10.213.{os.getpid() % 251}"
SWITCH = f"{RUN}-switch"
TEST_LINK = f"{RUN}-test"
TEST_ADDRESS = f"{NETWORK}.254"
INIT = """
import os, time
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        time.sleep(0.1)
"""
"""First process of a host. The others end with it."""


def why_not() -> str:
    """Return why this machine cannot have such hosts, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "unshare", "nsenter"):
        if shutil.which(command) is None:
            return f"the command {command} is not installed"
    made = subprocess.run(["ip", "netns", "add", f"{RUN}-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"{RUN}-try"], capture_output=True)
    return f"ip netns add failed: {made.stderr.strip()}" if made.returncode else ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class CommandFailed(Exception):
    """Command, status and the end of its output."""


class Host:
    def __init__(self, number: int, directory: Path) -> None:
        self.name, self.address = f"{RUN}-{number}", f"{NETWORK}.{number}"
        self._link = f"port-{number}"
        self.tmp = directory / self.name
        self.tmp.mkdir(mode=0o1777)
        _ip("netns", "add", self.name)
        link = ("link", "add", self._link, "netns", SWITCH)
        _ip(*link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("-n", SWITCH, "link", "set", self._link, "master", "bridge", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.name, "link", "set", device, "up")
        self.boot()

    def boot(self) -> None:
        """Start the first process."""
        script = f'mount --bind {self.tmp} /tmp && hostname {self.name} && exec "$@"'
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = [sys.executable, "-c", INIT]
        self._outside = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *spaces, "sh", "-c", script, "sh", *init], stdin=subprocess.DEVNULL
        )
        while not (found := [process for process in self.processes() if process.cmdline() == init]):
            time.sleep(0.02)
        self._init = found[0].pid

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command of this machine that runs one on this host."""
        return ["nsenter", "--target", str(self._init), "--mount", "--uts", "--pid", "--net", *words]

    def run(self, words: Sequence[str], environment: dict[str, str], timeout: float = 600) -> str:
        """Run a command to its end and return its output. Raises: CommandFailed"""
        done = subprocess.run(
            self.command(words),
            env=environment,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise CommandFailed(f"{' '.join(words)}: status {done.returncode}\n{done.stdout[-5000:]}")
        return done.stdout

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Return the processes of this host whose command line contains a text."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        found = []
        for pid in map(int, pids.split()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill(self) -> None:
        """End all of its processes at once, as if the power failed. `boot` starts it again."""
        self._outside.kill()
        self._outside.wait()
        while self.processes():
            time.sleep(0.02)

    def plug(self, connected: bool = True) -> None:
        _ip("-n", SWITCH, "link", "set", self._link, "up" if connected else "down")

    def remove(self) -> None:
        self.kill()
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


@contextlib.contextmanager
def hosts(number: int, directory: Path) -> Iterator[list[Host]]:
    """Yield hosts that reach each other, and that the test reaches."""
    made: list[Host] = []
    _ip("netns", "add", SWITCH)
    try:
        _ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "bridge", "up")
        _ip("link", "add", TEST_LINK, "type", "veth", "peer", "name", "test", "netns", SWITCH)
        _ip("-n", SWITCH, "link", "set", "test", "master", "bridge", "up")
        _ip("addr", "add", f"{TEST_ADDRESS}/24", "dev", TEST_LINK)
        _ip("link", "set", TEST_LINK, "up")
        for index in range(number):  # one by one, so that those before a failure are removed
            made.append(Host(index + 1, directory))  # noqa: PERF401
        yield made
    finally:
        for host in made:
            host.remove()
        subprocess.run(["ip", "link", "del", TEST_LINK], capture_output=True)
        subprocess.run(["ip", "netns", "del", SWITCH], capture_output=True)
