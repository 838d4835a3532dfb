"""Batching policies by name: built-in ones, one that a package registers, and errors that say what to do."""

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from protocol.codec import unpack
from services.config import SchedulerConfig
from services.plugins import PluginError
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import StepDispatched
from services.scheduler.policies import ChunkedPolicy, find_policy, make_policy
from tests.event_recorder import EventRecorder
from tests.examples.install import STEADY_DECODE, install, register
from tests.simulation.world import World, params

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=128, num_blocks=64, block_size=4)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the import path into which a test installs packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def register_policy(site: Path, value: str, name: str = "mine", package: str = "my-policies") -> None:
    register(site, package, {"runahead.policies": {name: value}})


def test_a_policy_of_an_installed_package(site: Path) -> None:
    """The example in tests/examples/steady_decode, in the simulated world: the tokens are those of `chunked`."""
    install(STEADY_DECODE, site)
    policy = find_policy("steady").from_config(SchedulerConfig(batching_policy="steady"), LIMITS)
    rng, shared = Random(0), 0
    for depth in (1, 2, 3):
        recorder = EventRecorder()
        world = World(LIMITS, depth, policy=policy, observer=recorder)
        for number in range(8):
            prompt = [rng.randrange(64) for _ in range(rng.randint(1, 40))]
            world.add(prompt, params(12, eos=number % 2 > 0))
            world.step()
        world.drain()
        entries: dict[int, int] = {}
        for event in recorder.events:
            if not isinstance(event, StepDispatched):
                continue
            entries |= {new.slot: len(unpack(new.token_ids)) for new in event.plan.new}
            prefills = event.step.starts < np.array([entries[slot] for slot in event.step.slots.tolist()])
            if not prefills.all():
                prefill = int(event.step.counts[prefills].sum())
                assert prefill <= 8, "half of the budget where a request decodes"
                shared += prefill > 0
    assert shared, "steps that decode and prefill"


def test_an_unknown_name_is_refused_with_the_list_of_names(site: Path) -> None:
    register_policy(site, "my_policies:Fair", "fair")
    with pytest.raises(PluginError, match="there is no such policy; choose one of chunked, balanced, phased, fair"):
        find_policy("fifo")


def test_a_module_that_fails_on_import_is_one_line(site: Path) -> None:
    (site / "failing_policy.py").write_text("raise RuntimeError('first line\\nsecond line')")
    register_policy(site, "failing_policy:Policy")
    with pytest.raises(
        PluginError, match=r"failing_policy:Policy of my-policies does not load: RuntimeError: first line second line$"
    ):
        find_policy("mine")


@pytest.mark.parametrize("value", ["json:dumps", "pathlib:Path", "json"])
def test_an_entry_point_that_is_no_policy(site: Path, value: str) -> None:
    register_policy(site, value)
    with pytest.raises(PluginError, match=f"{value} of my-policies is no batching policy: it must be a class with"):
        find_policy("mine")


def test_a_policy_without_a_constructor_from_the_configuration(site: Path) -> None:
    (site / "partial_policy.py").write_text(
        "class Partial:\n"
        "    def begin(self, view): ...\n"
        "    def order(self, view): ...\n"
        "    def admit(self, view, request, hit, count): ...\n"
    )
    register_policy(site, "partial_policy:Partial")
    with pytest.raises(PluginError, match="a class with from_config, begin, order, admit"):
        find_policy("mine")


def test_a_name_that_two_packages_register(site: Path) -> None:
    register_policy(site, "one:Policy", package="one")
    register_policy(site, "two:Policy", package="two")
    with pytest.raises(PluginError, match="one and two register this name; uninstall all but one"):
        find_policy("mine")


def test_a_registered_policy_does_not_replace_a_built_in_one(site: Path) -> None:
    register_policy(site, "no_such_module:Policy", "chunked")
    assert find_policy("chunked") is ChunkedPolicy


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('missing')", "from_config failed: KeyError: 'missing'"),
        ("return None", "from_config returned None, which is no batching policy"),
        ("raise ValueError('it takes 8 blocks')", "it takes 8 blocks"),
    ],
)
def test_a_policy_that_cannot_be_made(site: Path, body: str, says: str) -> None:
    (site / "unusable_policy.py").write_text(
        "from services.scheduler.policies import ChunkedPolicy\n"
        "class Unusable(ChunkedPolicy):\n"
        "    @classmethod\n"
        f"    def from_config(cls, config, limits): {body}\n"
    )
    register_policy(site, "unusable_policy:Unusable")
    sys.modules.pop("unusable_policy", None)
    with pytest.raises(ValueError, match=says):
        make_policy(SchedulerConfig(batching_policy="mine"), LIMITS)
