"""Invalid arguments of layers and students: each error names the argument, its value and what is expected."""

import json
import math

import numpy as np
import pytest
import torch

import rbm
from rbm import FusedRbMLayer, RbMFeedForward
from rbm.nn.moe import MoELayer, MoEStudent
from rbm.nn.simmlp import SimMLPStudent
from rbm.nn.students import CoHOpStudent, EnsembleStudent, MixtureStudent, MLPStudent, RbMStudent
from rbm.nn.tined import TINEDStudent

STUDENTS = [RbMStudent, MLPStudent, MoEStudent, TINEDStudent, SimMLPStudent, CoHOpStudent]

FAULTS = {
    "top_k": {
        3.0: (TypeError, r"top_k is 3\.0, expected a whole number; use int\(top_k\)"),
        True: (TypeError, "top_k is True, expected a whole number"),
        "3": (TypeError, "top_k is '3', expected a whole number"),
    },
    "in_features": {
        8.5: (TypeError, "in_features is 8.5, expected a whole number$"),
        None: (TypeError, "in_features is None, expected a whole number"),
    },
    "out_features": {"4": (TypeError, "out_features is '4', expected a whole number")},
    "num_experts": {torch.tensor(8): (TypeError, r"num_experts is tensor\(8\), .*; use int\(num_experts\)")},
    "decay": {
        True: (TypeError, "decay is True, expected a number"),
    },
    "dropout": {"a": (TypeError, "dropout is 'a', expected a number")},
    "gate_temperature": {
        math.inf: (ValueError, "gate_temperature is inf, expected a positive number, not an infinite one"),
        1e-50: (
            ValueError,
            r"gate_temperature is 1e-50, .* between 1\.17549e-38 and 3\.40282e\+38, the range of",
        ),
    },
    "detach_gates": {"no": (TypeError, "detach_gates is 'no', expected True or False")},
    "bias": {None: (TypeError, "bias is None, expected True or False")},
    "dtype": {
        int: (TypeError, "dtype is <class 'int'>, expected one of torch.float64, torch.float32"),
        torch.complex64: (TypeError, "dtype is torch.complex64, expected one of"),
    },
    "device": {"nosuch": (ValueError, "device is 'nosuch', expected one that PyTorch has here, such as 'cpu'")},
}
OF_FUSED = {
    "init_scale": {
        math.inf: (ValueError, "init_scale is inf, expected a positive number, not an infinite one"),
    },
    "init_attention": {"1": (TypeError, "init_attention is '1', expected a number")},
    "input_attention": {1: (TypeError, "input_attention is 1, expected True or False")},
}


def each(faults: dict) -> list[tuple]:
    return [(name, value, *found) for name, values in faults.items() for value, found in values.items()]


@pytest.mark.parametrize(
    ("layer", "name", "value", "error", "message"),
    [(FusedRbMLayer, *fault) for fault in each(FAULTS | OF_FUSED)] + [(RbMFeedForward, *f) for f in each(FAULTS)],
)
def test_arguments_of_a_layer(layer, name, value, error, message):
    sizes = {"out_features": 4, "in_features": 8, "num_experts": 8, "top_k": 3}
    sizes |= {"hidden_features": 4} if layer is RbMFeedForward else {}
    with pytest.raises(error, match=f"^{message}"):
        layer(**sizes | {name: value})


@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("in_channels", 8.0, r"in_channels is 8\.0, expected a whole number; use int\(in_channels\)"),
        ("out_channels", None, "out_channels is None, expected a whole number"),
        ("hidden_channels", "4", "hidden_channels is '4', expected a whole number"),
        ("num_layers", 2.0, r"num_layers is 2\.0, expected a whole number; use int\(num_layers\)"),
        ("dropout", 1.5, "dropout is 1.5, expected at least 0 and below 1"),
    ],
)
def test_arguments_of_a_student(student, name, value, message):
    sizes = {"in_channels": 8, "hidden_channels": 4, "out_channels": 3, "num_layers": 2}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        student(**sizes | {name: value})


def test_further_arguments():
    for make, message in (
        (lambda: CoHOpStudent(8, 4, 3, num_layers=3), "num_layers is 3, expected 1 or 2"),
        (
            lambda: EnsembleStudent(0, in_channels=8, hidden_channels=4, out_channels=3),
            "members is 0, expected at least",
        ),
        (
            lambda: TINEDStudent(8, 4, 3, propagation="start"),
            "propagation is 'start', expected one of layers, end, none",
        ),
        (
            lambda: MoELayer(8, 4, router_features=4, gates_over="some"),
            "gates_over is 'some', expected one of selected",
        ),
        (lambda: MoELayer(8, 4, router_features=4, pretrain="one"), "pretrain is 'one', expected one of first, prop"),
        (lambda: MoELayer(8, 4, router_features=4, noise=-1.0), "noise is -1.0, expected at least 0"),
        (lambda: MoELayer(8, 4, router_features=4, noise=math.inf), "noise is inf, expected at least 0, not infinite"),
        (lambda: MixtureStudent([], "none"), "layers are empty, expected at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="dropout_first_layer is 'no', expected True or False"):
        RbMStudent(8, 4, 3, dropout_first_layer="no")


def test_numpy_numbers_are_numbers_and_can_be_saved():
    student = RbMStudent(8, np.int64(4), np.arange(3).max() + 1, dropout=np.float32(0.5), num_experts=np.int32(4))
    assert type(student.layers[0].num_experts) is int
    assert type(student.layers[1].out_features) is int
    assert student.layers[1].dropout == 0.5
    assert json.loads(json.dumps(student.arguments)) == student.arguments


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [lambda: FusedRbMLayer(8, 3), lambda: MLPStudent(8, 4, 3)])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "features are None, expected a dense or CSR tensor, or the pair"),
        ("text", "features are a str, expected a dense or CSR tensor"),
        (np.ones((2, 8)), r"features are a ndarray, .*; use torch\.as_tensor\(features\)"),
        ([[1.0] * 8], r"features are a list, .*; use torch\.as_tensor\(features\)"),
        (torch.ones(2, 8).double(), "ha(s|ve) dtype torch.float64, expected torch.float32, that of the (param|stud)"),
        (torch.ones(2, 8).long(), "ha(s|ve) dtype torch.int64, expected torch.float32, that of the (param|stud)"),
    ],
)
def test_rows_that_no_forward_takes(training, make, given, message):
    model = make().train(training)
    with torch.set_grad_enabled(training), pytest.raises(TypeError, match=message):
        model(given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rbm.expert_usage(None), "model is a NoneType, expected a torch.nn.Module"),
        (
            lambda: rbm.parameter_groups(FusedRbMLayer(8, 3).parameters(), 0.1),
            "model is a generator, expected a torch.nn",
        ),
        (lambda: rbm.parameter_groups(FusedRbMLayer(8, 3), "a"), "weight_decay is 'a', expected a number"),
        (lambda: rbm.parameter_groups(FusedRbMLayer(8, 3), math.nan), "weight_decay is nan, expected at least 0"),
        (lambda: rbm.reset_dead_experts(FusedRbMLayer(8, 3), torch.ones(2, 8), min_share="1"), "min_share is '1', exp"),
        (lambda: RbMStudent.from_pretrained("/no/such"), "/no/such is no folder here, and no OWNER/NAME of the Hub"),
    ],
)
def test_arguments_of_functions(call, message):
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=f"^{message}"):
        call()


def test_float64_students_take_float64():
    student = MLPStudent(8, 4, 3).double()
    assert student(torch.ones(2, 8).double()).dtype == torch.float64
