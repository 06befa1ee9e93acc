"""The harness and its use by suites: turns, rotating tensors, errors, excluded times, output."""

import ast
import csv
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from kept_nodes import gradient_node_is_kept

from benchmarks.measure import harness, shapes
from benchmarks.measure.device import Device
from benchmarks.measure.harness import Results, Timing, interleave, relative_error, saved_bytes
from benchmarks.measure.shapes import Problem, Shape, Workload, clear_rows, for_this_machine, route, workloads
from benchmarks.measure.suite import Ceilings, Suite
from rbm_kernels.cost import Cost
from rbm_kernels.ops.expert_matmul import reference

SMALL = Workload(Shape(40, 12, 10, 4, 2), "float32")


@pytest.fixture
def suite(tmp_path) -> Suite:
    results = Results(tmp_path / "results.csv")
    return Suite("expert_matmul", SMALL, results, Ceilings(results, 0.0), 0.0)


def problem(workload: Workload = SMALL) -> Problem:
    return Problem.of(workload, "cpu")


def test_variants_take_turns_and_tensors_rotate():
    seen = []
    variants = {"a": [partial(seen.append, "a0"), partial(seen.append, "a1")], "b": partial(seen.append, "b0")}
    timings = interleave(variants, seconds=0.0, least=20, most=20)
    assert set(timings) == {"a", "b"}
    assert all(0 <= t.p20 <= t.median <= t.p80 for t in timings.values())
    # After the warm-up a turn of 200 calls each, in a new order in each round.
    names = "".join(name[0] for name in seen[-8000:])
    turns = [names[first : first + 400] for first in range(0, 8000, 400)]
    orders = [turn[0] + turn[-1] for turn in turns]
    assert turns == [first * 200 + last * 200 for first, last in orders]
    assert set(orders) == {"ab", "ba"}
    assert 5 <= orders.count("ab") <= 15
    tensors = [name for name in seen if name[0] == "a"][-4000:]
    assert set(tensors[::2]) != set(tensors[1::2])
    assert len(set(tensors[::2])) == len(set(tensors[1::2])) == 1


def test_percentiles():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == Timing(median=3.0, p20=2.0, p80=5.0)


def test_what_autograd_keeps_is_counted_once_and_arguments_not_at_all():
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    assert saved_bytes(lambda: x @ w, (x, w)) == 0
    assert saved_bytes(lambda: (x @ w).exp(), (x, w)) == 6 * 5 * 4
    assert saved_bytes(lambda: x @ w, (x,)) == 4 * 5 * 4


def test_a_copy_in_float64_keeps_no_node_of_the_original():
    p = problem()
    wide = p.in_float64()
    assert all(leaf.is_leaf and leaf.requires_grad and leaf.dtype == torch.float64 for leaf in wide.leaves)
    for name, tensor in vars(p).items():
        torch.testing.assert_close(getattr(wide, name), tensor.detach(), check_dtype=False)
        if tensor.requires_grad:
            assert not gradient_node_is_kept(tensor), f"no step with {name} could be captured in a CUDA graph"


def test_error_is_the_worst_and_nan_is_seen():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    wrong = exact + torch.tensor([0.0, 0.5])
    assert relative_error((exact, wrong), (exact, exact)) == pytest.approx(0.1)
    assert math.isnan(relative_error((exact, exact * float("nan")), (exact, exact)))


def test_one_set_of_few_rows_and_several_of_many():
    assert harness.buffer_sets(1000, Device()) == 1
    assert harness.buffer_sets(100 << 20, Device()) > 1


@pytest.mark.parametrize("wrong", ["an element", "unwritten", "raises no alarm"])
def test_what_is_wrong_is_named_and_not_timed(suite, wrong):
    def spoilt(*layer):
        y = reference.expert_matmul(*layer).clone()
        if wrong == "an element":
            y[7, 3] += 1
        elif wrong == "unwritten":
            y[7, 3] = float("nan")
        return y

    def step(f, p):
        return f(p.x, p.weight, p.bias, p.gates, p.experts)

    p = problem()
    exact = step(reference.expert_matmul, p.in_float64())
    both = {"rbm": spoilt, "eager": reference.expert_matmul}
    right = suite.check("forward", both, lambda f, p: (step(f, p),), p, (exact,))
    suite.time("forward", right, step, [p])
    written = {(row["implementation"], row["metric"]) for row in suite.results.rows}
    assert ("eager", "forward seconds") in written
    assert ("rbm", "forward error") in written
    if wrong == "raises no alarm":
        assert ("rbm", "forward seconds") in written
        suite.finish()
    else:
        assert ("rbm", "forward seconds") not in written
        with pytest.raises(AssertionError, match="rbm: error of forward"):
            suite.finish()


def test_no_suite_times_what_its_check_left_out():
    """What :meth:`Suite.check` returns is what may be timed: no suite drops it."""
    dropped = [
        f"{path.name}:{node.lineno}"
        for path in sorted(Path(harness.__file__).parents[1].glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("run.check(")
    ]
    assert dropped == []


def test_share_of_the_roofline_is_of_ceilings_of_the_same_run(suite):
    suite.ceilings._known |= {"float32": 1e9, "copy": 1e3}
    suite.time("forward", {"rbm": lambda p: None}, lambda f, p: f(p), [None], Cost(bytes=2, flops=10))
    rows = {row["metric"]: float(row["median"]) for row in suite.results.rows}
    assert rows["forward roofline share"] == pytest.approx(2e-3 / rows["forward seconds"], rel=1e-3)


def test_ceilings_are_measured_once_and_written(tmp_path):
    results = Results(tmp_path / "results.csv")
    ceilings = Ceilings(results, 0.0)
    assert ceilings.flops("float32") == ceilings.flops("float32") > 0
    assert ceilings.bandwidth() > 0
    assert [row["metric"] for row in results.rows] == ["FLOP/s", "bytes/s"]


def test_rows_are_written_as_they_come(tmp_path):
    results = Results(tmp_path / "folder" / "results.csv")
    for median in (1.0, 2.0):
        results.add("operator", "shape", "rbm", "forward seconds", median)
        with results.path.open(newline="") as file:
            read = list(csv.DictReader(file))
        assert float(read[-1]["median"]) == median
        assert tuple(read[-1]) == harness.COLUMNS


def test_shapes_are_cut_to_the_machine():
    assert for_this_machine(10**13) == shapes.SHAPES
    cut = for_this_machine(10**9)
    assert cut
    assert all(shape.multiplications <= 10**9 for shape in cut)
    assert {shape.experts for shape in cut} >= {3, 4, 8, 16, 32}
    assert len(set(cut)) == len(cut)
    listed = workloads(("float32", "bfloat16"))
    assert [w.routing for w in listed[:3]] == list(shapes.ROUTINGS)
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("kind", shapes.ROUTINGS)
def test_routing(kind):
    shape = Shape(4000, experts=8, top_k=3)
    experts = route(kind, shape)
    assert (experts.sort(-1).values.diff(dim=-1) > 0).all()
    load = torch.bincount(experts.flatten(), minlength=8) / 4000
    sets = len(experts.sort(-1).values.unique(dim=0))
    if kind == "uniform":
        assert load.min() > 0.3
        assert sets == 56
    if kind == "skewed":
        assert load[0] > 2 * load[7] > 0
    if kind == "clustered":
        assert sets <= 16


def test_no_rounding_decides_where_clear_rows_go():
    memory = torch.randn(8, 4)
    x = clear_rows(3000, memory, 3, "tf32")
    normal = torch.nn.functional.normalize
    largest = (normal(x.double(), dim=-1) @ normal(memory.double(), dim=-1).T).topk(4).values
    assert (largest[:, 2] - largest[:, 3]).min() >= 2e-3
    assert clear_rows(5, memory, 8).shape == (5, 4)


def test_a_peer_may_not_serve_a_dtype_but_ours_must(suite):
    def refuses(*_):
        raise RuntimeError("not for this dtype")

    exact = (torch.zeros(1),)
    implementations = {"eager": lambda: exact, "peer": refuses}
    assert list(suite.check("forward", implementations, lambda f, p: f(), None, exact)) == ["eager"]
    assert [row["metric"] for row in suite.results.rows] == ["forward error", "forward not served"]
    suite.finish()
    with pytest.raises(RuntimeError, match="not for this dtype"):
        suite.check("forward", {"eager": lambda: exact, "rbm": refuses}, lambda f, p: f(), None, exact)
