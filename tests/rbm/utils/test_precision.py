"""Faster float32 products: on which machines, how exact, and that settings are restored."""

import pytest
import torch

from rbm import distill
from rbm.config import Config
from rbm.utils import precision as matmul
from rbm.utils.precision import autocast, cast_once, fast_float32, full_precision, wide

QUICK = Config().updated(
    {section: {"max_epochs": 2, "min_epochs": 0} for section in ("teacher", "mlp")} | {"encoding": {"deepwalk": False}}
)


@pytest.fixture
def faster(monkeypatch):
    """Pretend to be a machine on which oneDNN is preferred."""
    monkeypatch.setattr(matmul, "_is_faster", lambda: True)


@pytest.fixture
def precision():
    """Set the precision, and restore it afterwards."""
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


def test_inside_and_outside(faster):
    with fast_float32("cpu"):
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(KeyError), fast_float32("cpu"):
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_are_of_float32():
    torch.manual_seed(0)
    a, b = torch.randn(300, 500), torch.randn(500, 200)
    with fast_float32("cpu"):
        product = a @ b
    exact = a.double() @ b.double()
    assert (product - exact).abs().max() < 1e-5 * exact.abs().max()


def test_bfloat16_is_noticed(monkeypatch):
    monkeypatch.setattr(matmul, "_product", lambda a: (a.bfloat16() @ a.bfloat16()).float())
    assert not matmul._is_exact()
    monkeypatch.setattr(matmul, "_product", lambda a: a @ a)
    assert matmul._is_exact()


@pytest.mark.parametrize("chosen", ["high", "medium"])
def test_the_callers_choice_stays(faster, precision, chosen):
    precision(chosen)
    with fast_float32("cpu"):
        assert torch.get_float32_matmul_precision() == chosen
    assert torch.get_float32_matmul_precision() == chosen


def test_a_choice_for_one_backend_stays(faster):
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    try:
        with fast_float32("cpu"):
            assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_other_devices_are_left_alone(faster):
    with fast_float32("cuda"):
        assert torch.get_float32_matmul_precision() == "highest"


def test_training_uses_it_and_predictions_do_not(faster, monkeypatch, small_graph):
    seen = {}

    def note(name, kept):
        def call(*arguments, **named):
            seen[name] = torch.get_float32_matmul_precision()
            return kept(*arguments, **named)

        return call

    from rbm.distillation import finish
    from rbm.teachers import prepare

    monkeypatch.setattr(prepare, "build_teacher_trainer", note("training", prepare.build_teacher_trainer))
    monkeypatch.setattr(finish, "student_latency", note("latency", finish.student_latency))
    distill(small_graph, config=QUICK, methods=["mlp"])
    assert seen == {"training": "medium", "latency": "highest"}


def bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_constant_rows_are_cast_once():
    rows = torch.randn(4, 3)
    assert cast_once(rows) is rows
    with bfloat16():
        copy = cast_once(rows)
        assert copy.dtype == torch.bfloat16
        assert torch.equal(copy, rows.bfloat16())
        assert cast_once(rows) is copy
        rows.mul_(2)
        assert torch.equal(cast_once(rows), rows.bfloat16()), "a copy of rows that have changed since"
        wide_rows = rows.double()
        assert cast_once(wide_rows) is wide_rows


def test_constant_rows_of_inference_mode_are_cast():
    with torch.inference_mode():
        rows = torch.randn(4, 3)
    with bfloat16():
        assert cast_once(rows).dtype == torch.bfloat16


def test_logits_become_wide():
    logits, trace = torch.randn(2, 3).bfloat16(), torch.randn(2, 3).bfloat16()
    found = wide((logits, trace))
    assert (found[0].dtype, found[1].dtype) == (torch.float32, torch.bfloat16)
    assert wide(logits.double()).dtype == torch.float64
    assert wide("as it is") == "as it is"


def test_full_precision_inside_autocast():
    a = torch.randn(3, 3)
    with bfloat16():
        assert (a @ a).dtype == torch.bfloat16
        with full_precision("cpu"):
            assert (a @ a).dtype == torch.float32
    with autocast("float32", "cpu"):
        assert (a @ a).dtype == torch.float32
    with autocast("bfloat16", "cpu"):
        assert (a @ a).dtype == torch.bfloat16
