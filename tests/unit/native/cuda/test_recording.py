"""Recordings of decode steps: which graph a step replays, and what a capture needs."""

import torch

from services.worker.kernels.cuda.graph_plan import GraphPlan
from services.worker.kernels.cuda.network import CudaNetwork
from services.worker.kernels.cuda.recording import GraphRecording
from services.worker.kernels.interface.buffers import Buffers
from tests.unit.native.interpreted import CopyingDevice, CountedGraphs


class StepBuffers(Buffers):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), tokens=8, tiles=8, sampled=8)
        self.slots = self._rows("tokens", dtype=torch.int32, padding=-1)
        self.tiles = self._rows("tiles", 4, dtype=torch.int32, padding=0)
        self.out = self._rows("sampled")


class CountedSteps:
    """A recording of two sizes, and the numbers of rows of which it was computed."""

    def __init__(self) -> None:
        self.graphs, self.buffers, self.rows = CountedGraphs(), StepBuffers(), list[tuple[int, ...]]()
        self.recording = GraphRecording(self.compute, self.buffers, GraphPlan((2, 6)), self.graphs)

    def compute(self, buffers: StepBuffers) -> torch.Tensor:
        self.rows.append((len(buffers.slots), len(buffers.tiles), len(buffers.out)))
        return buffers.out


def test_a_step_replays_the_next_larger_size() -> None:
    steps = CountedSteps()
    for rows in (1, 2, 3, 6):
        result = steps.recording.run(tokens=rows, tiles=rows, sampled=rows)
        assert result.data_ptr() == steps.buffers.out.data_ptr()
        assert len(result) >= rows
    assert steps.rows == [(2, 2, 2), (2, 2, 2), (6, 6, 6), (6, 6, 6)]
    assert (steps.graphs.captures, steps.graphs.replays) == (2, 2)


def test_a_step_without_a_graph_has_its_own_rows() -> None:
    steps = CountedSteps()
    steps.recording.run(tokens=7, tiles=2, sampled=1)
    steps.recording.run(tokens=7, tiles=7, sampled=7)
    assert steps.rows == [(7, 2, 1), (7, 7, 7)]
    assert steps.graphs.captures == 0


def test_capture_of_all_sizes_before_the_first_step() -> None:
    """The largest first, of padding rows only, with progress and the memory that it took. Then one step with chunks for
    each power of two and for the most tiles, whose kernels are compiled so."""
    steps, done = CountedSteps(), list[tuple[int, int]]()
    steps.buffers.slots.fill_(3)
    steps.buffers.tiles.fill_(3)
    assert steps.recording.capture(lambda number, total: done.append((number, total))) == 2 * 1024
    assert steps.rows == [(6, 6, 6), (2, 2, 2), (2, 1, 1), (3, 2, 1), (5, 4, 1), (8, 7, 1)]
    assert done == [(1, 2), (2, 2)]
    assert (steps.buffers.slots == -1).all()
    assert (steps.buffers.tiles == 0).all()
    steps.recording.run(tokens=4, tiles=4, sampled=4)
    assert (steps.graphs.captures, steps.graphs.replays) == (2, 1)


def test_each_epoch_has_graphs_of_its_own() -> None:
    """torch refuses to capture into a pool of memory whose graphs were all dropped."""
    made: list[CountedGraphs] = []

    def make() -> CountedGraphs:
        made.append(CountedGraphs())
        return made[-1]

    network = CudaNetwork(torch.float32, CopyingDevice(), make)
    for _ in range(2):
        network.record(lambda buffers: buffers.out, StepBuffers()).run(tokens=1, tiles=1, sampled=1)
    assert [graphs.captures for graphs in made] == [1, 1]
