"""Mistakes of those who deploy: each is named in one line, and nothing waits without end."""

import os
import shutil

import pytest

from services import release
from services.checkpoint import DEMO_MODEL
from tests.e2e.server import wait_until
from tests.ray.cluster import BIN, CONTROLLER, Cluster
from tests.ray.hosts import CommandFailed


def failed_serve_run(cluster: Cluster, *arguments: str, **model: str) -> str:
    """Return the output of `serve run`, which ends with status 0, too, and shuts Serve down. Until that has happened,
    Serve ignores what is deployed."""
    output = cluster.serve(*arguments, "drain_timeout_seconds=2", **model)
    wait_until(lambda: not cluster.processes(CONTROLLER), "the application is removed")
    assert "Exception in thread" not in output
    return output


def test_too_few_cpus_end_the_deployment_with_what_is_missing(cluster: Cluster) -> None:
    output = failed_serve_run(cluster, "tensor_parallel_size=2", "threads=3")
    assert "6 CPUs on one node are free 0 times, not 1 times" in output


def test_runahead_ray_refuses_too_few_cpus_in_one_line(cluster: Cluster) -> None:
    with pytest.raises(CommandFailed) as failed:
        cluster.runahead("ray", str(DEMO_MODEL), "--tensor-parallel-size", "2", "--threads", "3")
    line = str(failed.value).splitlines()[-1]
    assert line.startswith("runahead: 1 engine of 2 ranks and 1 frontend need 8 CPUs; the nodes have 4 CPUs +"), line
    assert "6 CPUs on one node are free 0 times, not 1 times" in line


def test_cpus_that_others_use_are_waited_for_with_a_line_and_until_ctrl_c(cluster: Cluster) -> None:
    cluster.python(
        "@ray.remote(num_cpus=4)\nclass Other:\n    def ready(self): pass\n"
        "others = [Other.options(name=f'other-{n}', lifetime='detached').remote() for n in range(3)]\n"
        "ray.get([other.ready.remote() for other in others])"
    )
    command = [str(BIN / "runahead"), "ray", str(DEMO_MODEL), "--drain-timeout-seconds", "2"]
    interrupted = ["timeout", "--preserve-status", "--signal", "INT", "50"]
    output = cluster.hosts[0].run([*interrupted, *command], cluster.environment)  # its status is 0
    assert "runahead: a replica of default waits: Deployment 'Engine' in application 'default' has 1" in output
    assert "Serving" not in output
    cluster.python("[ray.kill(ray.get_actor(f'other-{n}')) for n in range(3)]")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("record=/tmp/x", "--record: an application on Ray does not have this setting"),
        ("tensor_paralel_size=2", "there is no setting tensor_paralel_size (tensor-parallel-size?)"),
        ("threads=0", "--threads: input should be greater than or equal to 1, not '0'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(cluster: Cluster, setting: str, text: str) -> None:
    with pytest.raises(CommandFailed) as failed:
        cluster.serve(setting)
    assert text in str(failed.value)


def test_a_cluster_that_is_not_there(cluster: Cluster) -> None:
    address = f"{cluster.hosts[0].address}:1234"
    with pytest.raises(CommandFailed) as failed:
        cluster.runahead("ray", "--address", address)
    assert str(failed.value).splitlines()[-1].startswith(f"runahead: --address {address}: ")


def test_a_model_that_is_not_on_the_node_of_a_rank(cluster: Cluster) -> None:
    """Each host has a /tmp of its own. The model is on one of them, so one of two ranks lacks it."""
    shutil.copytree(DEMO_MODEL, cluster.hosts[0].tmp / "model", dirs_exist_ok=True)
    output = failed_serve_run(cluster, "tensor_parallel_size=2", "placement_group_strategy=SPREAD", model="/tmp/model")
    assert "runahead: a replica of default has failed: " in output
    assert "no such model directory: /tmp/model" in output


LOST_KEYS = f"""
import shutil, time
from services import release
from services.ray.actors import RankActor, SchedulerActor
class KeylessRank(RankActor):
    def lose_keys(self):
        shutil.rmtree(self._keys.path)
start = lambda kind, **more: ray.remote(kind).options(num_cpus=1, max_concurrency=9, **more).remote(
    "lost", {{"model": {str(DEMO_MODEL)!r}, "backend": "sim"}}, release.version())
actors = start(SchedulerActor, name="lost"), start(KeylessRank)
ray.get(actors[1].lose_keys.remote())
while not (failure := ray.get(actors[1].failure.remote())):
    time.sleep(0.1)
print(failure)
"""


def test_a_rank_that_cannot_follow_its_scheduler_has_failed(cluster: Cluster) -> None:
    """It was healthy without the thread that joins the scheduler."""
    assert "the worker cannot be started: [Errno 2] No such file or directory: " in cluster.python(LOST_KEYS)


def test_a_scheduler_on_a_node_without_the_model_does_not_serve_without_grammars(cluster: Cluster) -> None:
    output = cluster.python(
        "from services.ray.actors import SchedulerActor\n"
        f"arguments = 'engine', {{'model': '/nowhere'}}, {release.version()!r}\n"
        "actor = ray.remote(SchedulerActor).remote(*arguments)\n"
        "try: ray.get(actor.failure.remote())\n"
        "except ray.exceptions.ActorDiedError as error: print(error)"
    )
    assert ": scheduler: no such model directory: /nowhere" in output


def test_another_version_of_runahead_on_a_node(cluster: Cluster) -> None:
    host = cluster.hosts[2]
    other = host.tmp / "other" / f"{release.DISTRIBUTION.replace('-', '_')}-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {release.DISTRIBUTION}\nVersion: 0.0.1\n")
    host.kill()
    host.boot()
    cluster.start_node(host, PYTHONPATH=f"/tmp/other:{os.getcwd()}")
    output = failed_serve_run(cluster, "tensor_parallel_size=2", "placement_group_strategy=SPREAD")
    versions = f"has Runahead 0.0.1, and the application {release.version()}; install one version on all nodes"
    assert f"node {host.address} {versions}" in output
