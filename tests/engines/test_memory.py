"""What scoring holds at a time, counted tensor by tensor and seen from outside the process."""

import functools
import gc
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import whence
from helpers.toys import categorical_view, difference, mlp_view, model, records_for
from whence import Action, Return, attribute
from whence.engines import ENGINES, memory
from whence.sb3 import collect

MIB = 2**20


def most_held(policy: object, records: whence.RecordBatch, **options: object) -> int:
    """Return the most bytes that scoring holds in tensors of its own."""
    return max(memory.measure_bytes(lambda: attribute(policy, records, target=Return(), **options)))


def test_the_meter_counts_what_lives() -> None:
    before = torch.zeros(1000)

    def run() -> None:
        view = before[:500]  # no memory of its own
        first = before * 2
        second = first.view(10, 100).t()
        del first
        third = second.contiguous()
        del second, third, view

    assert memory.measure_bytes(run) == [0, 4000, 8000, 4000, 0]


@pytest.mark.parametrize(
    ("engine", "budget"),
    [
        *(("ghost", 2), ("forward", 2), ("vmap", 8)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("ghost", 8), ("forward", 8), ("vmap", 2))),
    ],
)
def test_what_is_held_stays_within_the_budget_for_tensors(engine: str, budget: int) -> None:
    wide = categorical_view(nn.Sequential(nn.Linear(5, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3)))
    records = records_for(wide, 3000)
    allowed = (budget * MIB - memory._BYTES_PER_NUMBER * len(records)) / memory._MARGIN
    held = most_held(wide, records, engine=engine, memory=budget * MIB)
    # What is kept for all records has its own share of the budget.
    assert held <= allowed + memory._BYTES_PER_NUMBER * len(records)
    assert held > 0.5 * allowed, "the budget is hardly used"


@pytest.mark.parametrize(("device", "free", "allowed"), [("cuda", 70, 20), ("cuda", 10, 5), ("cpu", 70, 2)])
def test_the_budget_follows_the_device(monkeypatch: pytest.MonkeyPatch, device: str, free: int, allowed: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of: (free * 1024 * MIB, 80 * 1024 * MIB))
    assert memory.choose_memory(torch.device(device)) == allowed * 1024 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of: ((free - 6) * 1024 * MIB, 80 * 1024 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda of: 7 * 1024 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda of: 1024 * MIB)
    assert memory.choose_memory(torch.device(device)) == allowed * 1024 * MIB  # of blocks that torch keeps for later


def test_scoring_without_a_budget_has_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("whence.scores.attribution.choose_memory", lambda device: seen.append(device) or MIB)
    attribute(mlp_view(), records_for(mlp_view(), 20), target=Return())
    assert seen == [torch.device("cpu")]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["return", "action"])
def test_a_small_budget_gives_the_same_scores(engine: str, name: str) -> None:
    view = mlp_view()
    records = records_for(view, 200)
    target = {"return": Return(), "action": Action(records.observations[:2], records.actions[:2])}[name]
    whole = attribute(view, records, target=target, engine=engine)
    seen = []

    class Watching(whence.ModuleView):
        def prepare(self, records: whence.RecordBatch) -> object:
            seen.append(len(records))
            return super().prepare(records)

    watching = Watching(view.module, view._outputs, view._prepare)
    budgeted = attribute(watching, records, target=target, engine=engine, memory=64 * 1024)
    assert difference(budgeted, whole) <= 1e-5
    # No more records are prepared at a time than are scored at a time. For a target that runs the policy itself the
    # loop holds nothing for each record but its inputs, and those of 200 fit.
    assert 8 < max(seen) < 200 or (engine, name) == ("loop", "action")


def test_a_target_of_ones_own_is_not_run_on_a_few_records() -> None:
    view = mlp_view()
    records = records_for(view, 60)
    weights = torch.randn(60)

    def target(view: whence.PolicyView, params: whence.core.Params, records: whence.RecordBatch) -> torch.Tensor:
        return (view(params, view.prepare(records)).log_prob * weights).mean()

    assert attribute(view, records, target=target).engine == "ghost"


def test_the_cost_is_measured_once_per_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    measure = memory._measure_cost
    monkeypatch.setattr(memory, "_measure_cost", lambda *args: measured.append(None) or measure(*args))
    view = mlp_view()
    for count in (40, 80, 120):
        attribute(view, records_for(view, count), target=Return())
    assert len(measured) == 1
    attribute(view, records_for(view, 40), target={"a": Return(), "b": Return()})
    assert len(measured) == 2


def repeating(network: nn.Module, times: int) -> whence.ModuleView:
    """Return a view that keeps `times` numbers for each feature of a record."""

    def log_probs(module: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        wide = inputs["observations"][:, None].expand(-1, times, -1).exp().log().mean(1)
        return module(wide).log_softmax(-1).gather(-1, inputs["actions"][:, None]).squeeze(-1)

    return whence.ModuleView(network, log_probs)


def frugal(outputs: whence.Outputs, records: whence.RecordBatch) -> Tensor:
    return outputs.log_prob


def greedy(outputs: whence.Outputs, records: whence.RecordBatch) -> Tensor:
    return (outputs.log_prob[:, None].expand(-1, 300).exp() * records.advantages[:, None]).mean(1)


@pytest.mark.parametrize(
    ("heavy", "engine"),
    [
        *(("view", "ghost"), ("view", "vmap"), ("objective", "forward")),
        *(pytest.param("objective", engine, marks=pytest.mark.long) for engine in ("ghost", "vmap")),
        pytest.param("view", "forward", marks=pytest.mark.long),
    ],
)
def test_views_and_objectives_have_costs_of_their_own(heavy: str, engine: str) -> None:
    light = repeating(mlp_view().module, 1)
    records = records_for(light, 600)
    attribute(light, records, target=Return(), objective=frugal, engine=engine)
    view = repeating(light.module, 400) if heavy == "view" else light
    objective = greedy if heavy == "objective" else frugal
    held = most_held(view, records, objective=objective, engine=engine, memory=2 * MIB)
    assert held <= (
        2 * MIB - memory._BYTES_PER_NUMBER * len(records)
    ) / memory._MARGIN + memory._BYTES_PER_NUMBER * len(records)


def test_notes_go_with_the_view() -> None:
    gc.collect()
    before = len(whence.core.policies._NOTES)
    toy, view = model(), repeating(mlp_view().module, 2)
    for policy, records in ((view, records_for(view)), (toy.policy, collect(toy))):
        attribute(policy, records, target=Return())
    assert len(whence.core.policies._NOTES) == before + 2
    del toy, view, policy, records
    gc.collect()
    assert len(whence.core.policies._NOTES) == before


RISE = """
import ctypes, gc, sys
import torch, whence
from helpers.toys import mlp_view, records_for

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

torch.set_num_threads(1)
engine, budget = sys.argv[1], int(sys.argv[2])
view = mlp_view((8, 64, 64, 4))
records = records_for(view, 100_000, features=8)
whence.attribute(view, records.take(slice(0, 64)), target=whence.Return(), engine=engine)  # loads code
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the high-water mark starts again from here
before = status("VmRSS")
whence.attribute(view, records, target=whence.Return(), engine=engine, memory=budget)
print(status("VmHWM") - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("engine", ["ghost", "forward", "vmap"])
def test_the_process_stays_under_256_mib_for_100_000_records(engine: str) -> None:
    budget = 256 * MIB
    command = [sys.executable, "-c", RISE, engine, str(budget)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stderr
    assert 16 * MIB < int(run.stdout) < budget


@pytest.mark.parametrize("part", ["auto.check_against_loop", "leave_one_out._solve_record_by_record"])
@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("of a GPU"), RuntimeError("DefaultCPUAllocator: no")])
def test_a_lack_of_memory_is_raised_and_another_failure_worked_around(part, failure, monkeypatch) -> None:
    view = mlp_view()
    score = functools.partial(attribute, view, records_for(view, 12), target=Return(), leave_one_out="record")
    expected = score()
    monkeypatch.setattr(f"whence.engines.{part}", Mock(side_effect=RuntimeError("no rule of vmap")))
    assert difference(score(), expected) <= 1e-5
    monkeypatch.setattr(f"whence.engines.{part}", Mock(side_effect=failure))
    with pytest.raises(type(failure), match=str(failure)):
        score()
