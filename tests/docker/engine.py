"""Docker Engine and Compose for the tests: those of this machine, or Debian's packages and a daemon for one session."""

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
OWN_BASE, SUITE = "runahead-base:bookworm", "bookworm"
PATIENCE = 90.0
"""Seconds for a daemon to answer, or a registry."""
PACKAGES = {"dockerd": "docker.io", "docker-compose": "docker-compose", "debootstrap": "debootstrap"}
INTEGRATED_BUILDKIT = 23
"""Clients before this version bring BuildKit themselves, later ones ask for the buildx plugin."""
BRIDGE = Path("/sys/class/net/docker0")
"""A daemon makes this interface and leaves it behind."""
UNNEEDED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")


class Unavailable(Exception):
    """Docker cannot be had here; says what to install or start."""


class Engine:
    """A daemon that answers, and the clients that speak to it."""

    def __init__(self, host: str = "") -> None:
        """Args: host: its socket; "" for the one that the environment names."""
        self.environment = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
        self.client = _client()
        self.compose = self._compose()

    def run(self, *arguments: str, timeout: float = 120, **environment: str) -> str:
        """What `docker ARGUMENTS` printed. Raises: CalledProcessError, with what it said"""
        return output([self.client, *arguments], {**self.environment, **environment}, timeout)

    def has_image(self, name: str) -> bool:
        return bool(self.run("image", "ls", "--quiet", name).strip())

    def build(self, base: str, version: str) -> None:
        """The images as a user builds them. Wheels that pip is configured to prefer here are preferred there."""
        environment = {
            **self.environment,
            "DOCKER": self.client,
            "BASE_IMAGE": base,
            "RUNAHEAD_VERSION": version,
        }
        environment.setdefault("PIP_FIND_LINKS", _find_links())
        output([str(ROOT / "deploy" / "docker" / "build")], environment, timeout=1500)
        ours = "label=org.opencontainers.image.title=runahead"  # those that had these names until now
        self.run("image", "prune", "--force", "--filter", ours)

    def base_image(self) -> str:
        """BASE_IMAGE, or the published one if a registry can be reached, or one that is made here."""
        if chosen := os.environ.get("BASE_IMAGE"):
            return chosen
        if self.has_image(PUBLISHED_BASE) or self._pulls(PUBLISHED_BASE):
            return PUBLISHED_BASE
        if not self.has_image(OWN_BASE):
            self._bootstrap(OWN_BASE)
        return OWN_BASE

    def _pulls(self, name: str) -> bool:
        try:
            self.run("pull", "--quiet", name, timeout=PATIENCE)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False
        return True

    def _bootstrap(self, name: str) -> None:
        """Debian with Python, from its own packages."""
        install("debootstrap")
        with tempfile.TemporaryDirectory(prefix="runahead-base-") as directory:
            packages = "--include=python3,python3-venv,ca-certificates"
            output(
                ["debootstrap", "--variant=minbase", packages, SUITE, directory],
                self.environment,
                timeout=900,
            )
            excluded = [f"--exclude=./{path}/*" for path in UNNEEDED]
            tar = subprocess.Popen(["tar", "-C", directory, *excluded, "-c", "."], stdout=subprocess.PIPE)
            importing = [self.client, "import", "-", name]
            subprocess.run(
                importing, stdin=tar.stdout, env=self.environment, check=True, stdout=subprocess.DEVNULL
            )
            assert tar.stdout is not None
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
def engine() -> Iterator[Engine]:
    """The daemon that answers already, or one that ends with the session; its images stay for the next."""
    if shutil.which("docker") is not None and _answers(""):
        yield Engine()
        return
    install("dockerd")
    with (
        tempfile.TemporaryDirectory(prefix="runahead-docker-") as directory,
        _daemon(Path(directory)) as host,
    ):
        yield Engine(host)


@contextmanager
def _daemon(directory: Path) -> Iterator[str]:
    """Where the kernel has no overlay file system, the slow driver that needs nothing of it."""
    for driver in ([], ["--storage-driver=vfs"]):
        host, log = f"unix://{directory}/socket", directory / "log"
        command = ["dockerd", f"--host={host}", f"--exec-root={directory}/exec", *driver]
        if shutil.which("setpriv"):  # nobody may be left behind when this process is killed
            command = ["setpriv", "--pdeathsig", "TERM", *command]
        had_bridge = BRIDGE.exists()
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
        try:
            if _comes_up(process, host):
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
    raise Unavailable(f"the Docker daemon does not start here: {log.read_text()[-1000:]}")


def _comes_up(process: "subprocess.Popen[bytes]", host: str) -> bool:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if _answers(host):
            return True
        time.sleep(0.2)
    return False


def _answers(host: str) -> bool:
    environment = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
    try:
        output(["docker", "info"], environment, timeout=30)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


def _client() -> str:
    """The first client that can build with BuildKit: there may be several on the path. Raises: Unavailable"""
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
    """Debian's package with this program, unless it is here. Raises: Unavailable"""
    if shutil.which(binary) is not None:
        return
    package = PACKAGES[binary]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"{binary} is missing; install {package}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    output(["apt-get", "update"], environment, timeout=300)
    output(["apt-get", "install", "--yes", "--no-install-recommends", package], environment, timeout=600)


def _find_links() -> str:
    """The first directory of wheels that this machine's pip is told to look into; "" if there is none."""
    settings = output([sys.executable, "-m", "pip", "config", "list"], None, timeout=60)
    for line in settings.splitlines():
        name, _, value = line.partition("=")
        if name.endswith("find-links"):
            for place in value.strip("'\"").replace("\\n", " ").split():
                if Path(place).is_dir():
                    return place
    return ""


def output(command: list[str], environment: dict[str, str] | None, timeout: float) -> str:
    """Standard output. Raises: CalledProcessError, with both outputs as a note; TimeoutExpired"""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note((done.stdout + done.stderr)[-4000:])
        raise error
    return done.stdout
