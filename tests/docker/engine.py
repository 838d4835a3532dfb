"""Docker and Compose for the tests: those of this machine, or Debian's packages with a daemon for one session."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED_BASE = "python:3.11.13-slim-bookworm"
"""The Dockerfile's default."""
BOOTSTRAPPED_BASE, SUITE = "runahead-base:bookworm", "bookworm"
PATIENCE = 90.0
"""Seconds to wait for a daemon or a registry."""
PACKAGES = {"dockerd": "docker.io", "docker-compose": "docker-compose", "debootstrap": "debootstrap"}
INTEGRATED_BUILDKIT = 23
"""Clients before this version contain BuildKit; later ones need the buildx plugin."""
BRIDGE = Path("/sys/class/net/docker0")
"""Interface that a daemon makes and does not remove."""
UNNEEDED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")


class Unavailable(Exception):
    """Docker cannot be used on this machine. The text gives the remedy."""


class DockerEngine:
    """A running daemon and its clients."""

    def __init__(self, host: str = "") -> None:
        """Args: host: socket of the daemon; "" for the one in the environment."""
        self.environment = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
        self.client = _client()
        self.compose = self._compose()

    def run(self, *arguments: str, timeout: float = 120, **environment: str) -> str:
        """Return the output of `docker ARGUMENTS`. Raises: CalledProcessError, with the output."""
        return output([self.client, *arguments], {**self.environment, **environment}, timeout)

    def has_image(self, name: str) -> bool:
        return bool(self.run("image", "ls", "--quiet", name).strip())

    def build(self, base: str, version: str) -> None:
        """Build the images with the script for users, and with the wheels that pip prefers on this machine."""
        environment = {**self.environment, "DOCKER": self.client, "BASE_IMAGE": base, "RUNAHEAD_VERSION": version}
        environment.setdefault("PIP_FIND_LINKS", _find_links())
        output([str(ROOT / "deploy" / "docker" / "build")], environment, timeout=1500)
        ours = "label=org.opencontainers.image.title=runahead"  # removes the images that had these names before
        self.run("image", "prune", "--force", "--filter", ours)

    def base_image(self) -> str:
        """Return BASE_IMAGE, or the published image if a registry is reachable, or one that is made here."""
        if chosen := os.environ.get("BASE_IMAGE"):
            return chosen
        if self.has_image(PUBLISHED_BASE) or self._pulls(PUBLISHED_BASE):
            return PUBLISHED_BASE
        if not self.has_image(BOOTSTRAPPED_BASE):
            self._bootstrap(BOOTSTRAPPED_BASE)
        return BOOTSTRAPPED_BASE

    def _pulls(self, name: str) -> bool:
        try:
            self.run("pull", "--quiet", name, timeout=PATIENCE)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False
        return True

    def _bootstrap(self, name: str) -> None:
        """Make an image of Debian with Python from Debian's packages."""
        install("debootstrap")
        with tempfile.TemporaryDirectory(prefix="runahead-base-") as directory:
            packages = "--include=python3,python3-venv,ca-certificates"
            output(["debootstrap", "--variant=minbase", packages, SUITE, directory], self.environment, timeout=900)
            excluded = [f"--exclude=./{path}/*" for path in UNNEEDED]
            tar = subprocess.Popen(["tar", "-C", directory, *excluded, "-c", "."], stdout=subprocess.PIPE)
            importing = [self.client, "import", "-", name]
            subprocess.run(importing, stdin=tar.stdout, env=self.environment, check=True, stdout=subprocess.DEVNULL)
            tar.stdout.close()
            assert tar.wait() == 0

    def _compose(self) -> list[str]:
        try:
            self.run("compose", "version")
        except subprocess.CalledProcessError:
            install("docker-compose")
            return ["docker-compose"]
        return [self.client, "compose"]


@contextmanager
def docker_engine() -> Iterator[DockerEngine]:
    """Use the running daemon, or start one for this session. Its images are kept for the next session."""
    if shutil.which("docker") is not None and _is_running(""):
        yield DockerEngine()
        return
    install("dockerd")
    with tempfile.TemporaryDirectory(prefix="runahead-docker-") as directory, _daemon(Path(directory)) as host:
        yield DockerEngine(host)


@contextmanager
def _daemon(directory: Path) -> Iterator[str]:
    """Start a daemon. Without an overlay file system in the kernel it uses the slow driver vfs."""
    for driver in ([], ["--storage-driver=vfs"]):
        host, log = f"unix://{directory}/socket", directory / "log"
        command = ["dockerd", f"--host={host}", f"--exec-root={directory}/exec", *driver]
        if shutil.which("setpriv"):  # the daemon must end when this process is killed
            command = ["setpriv", "--pdeathsig", "TERM", *command]
        had_bridge = BRIDGE.exists()
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
        try:
            if _wait_until_running(process, host):
                yield host
                return
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if BRIDGE.exists() and not had_bridge and (ip := shutil.which("ip")):
                subprocess.run([ip, "link", "delete", BRIDGE.name], check=True)
    raise Unavailable(f"the Docker daemon does not start: {log.read_text()[-1000:]}")


def _wait_until_running(process: "subprocess.Popen[bytes]", host: str) -> bool:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if _is_running(host):
            return True
        time.sleep(0.2)
    return False


def _is_running(host: str) -> bool:
    environment = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
    try:
        output(["docker", "info"], environment, timeout=30)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


def _client() -> str:
    """Return the first client on the path that can build with BuildKit. Raises: Unavailable"""
    for directory in os.environ.get("PATH", "").split(os.pathsep):
        candidate = shutil.which("docker", path=directory)
        if candidate is None:
            continue
        try:
            output([candidate, "buildx", "version"], None, timeout=30)
        except subprocess.CalledProcessError:
            version = output([candidate, "--version"], None, timeout=30).removeprefix("Docker version ")
            if int(version.partition(".")[0]) >= INTEGRATED_BUILDKIT:
                continue
        return candidate
    raise Unavailable("no docker client here has BuildKit; install the buildx plugin, or Debian's docker.io")


def install(binary: str) -> None:
    """Install Debian's package of a program if it is missing. Raises: Unavailable"""
    if shutil.which(binary) is not None:
        return
    package = PACKAGES[binary]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"{binary} is missing; install {package}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    output(["apt-get", "update"], environment, timeout=300)
    output(["apt-get", "install", "--yes", "--no-install-recommends", package], environment, timeout=600)


def _find_links() -> str:
    """Return the first directory of wheels in the configuration of pip, "" if there is none."""
    settings = output([sys.executable, "-m", "pip", "config", "list"], None, timeout=60)
    for line in settings.splitlines():
        name, _, value = line.partition("=")
        if name.endswith("find-links"):
            for place in value.strip("'\"").replace("\\n", " ").split():
                if Path(place).is_dir():
                    return place
    return ""


def output(command: list[str], environment: dict[str, str] | None, timeout: float) -> str:
    """Run a command and return its standard output.

    Raises: CalledProcessError, with both outputs as a note; TimeoutExpired
    """
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note((done.stdout + done.stderr)[-4000:])
        raise error
    return done.stdout
