"""The examples run and print the output shown in docs/layer.md."""

import re
import subprocess
import sys

import pytest
import torch
from scripts import ROOT, load_script


def test_digits_in_four_orientations(tmp_path, capsys):
    example = load_script("examples/rotated_digits.py")
    found = example.main(tmp_path, epochs=20, seed=0)
    assert found["nn.Linear"] < 0.8 < found["a hidden layer"]
    assert found["FusedRbMLayer"] > found["a hidden layer"] + 0.005
    assert found["loaded"] == found["exported"] == found["FusedRbMLayer"]
    printed = capsys.readouterr().out
    assert f"FusedRbMLayer: {found['FusedRbMLayer']:.2%}" in printed
    # Both use the same number of parameters per prediction.
    active = [example.active_parameters(model) for model in (example.hidden_layer(), example.mixture())]
    assert abs(active[0] / active[1] - 1) < 0.02

    # Elsewhere, the exported file only needs the operators and accepts any number of images.
    torch.save(example.rotated_digits()[2][:5], tmp_path / "images.pt")
    program = (
        "import sys, torch, rbm_kernels; images = torch.load('images.pt');"
        "model = torch.export.load('digits.pt2').module();"
        "assert [len(model(images[:n])) for n in (1, 5)] == [1, 5]; assert 'rbm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_transformer_of_experts_is_trained_observed_compiled_exported_and_served(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    assert len((ROOT / "examples" / "digits_transformer.py").read_text().splitlines()) < 120
    found = load_script("examples/digits_transformer.py").main(tmp_path, epochs=2, seed=0, backend="eager")
    assert found["trained"] > 0.3  # chance is 0.1; 30 epochs are in docs/layer.md
    assert found["compiled"] == found["served"] == found["trained"]
    printed = capsys.readouterr().out
    assert re.findall(r"(?m)^(blocks\S+) +([\d,]+) ", printed) == [(f"blocks.{i}.ffn", "7,200") for i in range(2)]
    assert f"served: {found['served']:.2%}" in printed
