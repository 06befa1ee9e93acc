"""The cache of results, keyed by the content of their inputs."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rbm.utils.cache import Cache, cache_or_temporary
from rbm.utils.tensor_files import fingerprint, read_sealed, sealed

WANTS = """
import sys, time, torch
from rbm.utils.cache import Cache

def compute():
    with open(sys.argv[2], "a") as file:
        file.write("x")
    time.sleep(8)  # longer than imports are apart
    return {"a": torch.tensor([7.0])}

print(Cache(sys.argv[1]).tensors("slow", {}, [], compute)["a"].item())
"""


class Counted:
    """A computation that counts how often it ran."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.runs += 1
        return {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor([self.runs])}


def test_a_known_result_is_not_computed_again(tmp_path):
    compute, edges = Counted(), torch.tensor([[0, 1], [1, 0]])
    first = Cache(tmp_path).tensors("walk", {"dim": 4}, [edges], compute)
    second = Cache(tmp_path).tensors("walk", {"dim": 4}, [edges], compute)
    assert compute.runs == 1
    assert all(torch.equal(first[name], second[name]) for name in ("a", "b"))
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


@pytest.mark.parametrize("place", [-5, 60, 0])
def test_a_flipped_bit_is_not_taken_for_a_result(place, tmp_path):
    """A bit in a value, in the header, or in the length of the header."""
    compute = Counted()
    kept = Cache(tmp_path).tensors("walk", {"dim": 4}, [], compute)
    (path,) = tmp_path.glob("*.safetensors")
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 64
    path.write_bytes(damaged)
    again = Cache(tmp_path).tensors("walk", {"dim": 4}, [], compute)
    assert compute.runs == 2
    assert torch.equal(again["a"], kept["a"])


@pytest.mark.parametrize(
    ("kind", "settings", "inputs"),
    [
        ("other", {"dim": 4}, [torch.zeros(4)]),
        ("walk", {"dim": 5}, [torch.zeros(4)]),
        ("walk", {"dim": 4}, [torch.zeros(4, dtype=torch.float64)]),
        ("walk", {"dim": 4}, [torch.zeros(2, 2)]),
        ("walk", {"dim": 4}, [torch.tensor([0.0, 0, 0, 1])]),
        ("walk", {"dim": 4}, []),
        ("walk", {"dim": 4}, [torch.zeros(4), torch.zeros(0)]),
    ],
)
def test_whatever_differs_differs_in_the_fingerprint(kind, settings, inputs):
    assert fingerprint(kind, settings, inputs) != fingerprint("walk", {"dim": 4}, [torch.zeros(4)])


def test_csr_tensors_differ_by_their_columns():
    one = torch.tensor([[1.0, 0], [0, 1]]).to_sparse_csr()
    other = torch.tensor([[0, 1.0], [1, 0]]).to_sparse_csr()
    assert fingerprint("x", {}, [one]) != fingerprint("x", {}, [other])


def test_a_damaged_file_is_made_anew(tmp_path):
    compute = Counted()
    Cache(tmp_path).tensors("walk", {}, [], compute)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:10])
    assert Cache(tmp_path).tensors("walk", {}, [], compute)["b"].item() == 2
    assert Cache(tmp_path).tensors("walk", {}, [], compute)["b"].item() == 2


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"cache .*x: .*file is a file, expected a folder; name another"):
        Cache(tmp_path / "file" / "x")
    with pytest.raises(NotADirectoryError), cache_or_temporary(tmp_path / "file" / "x"):
        pytest.fail("a search would have replaced the run")
    Cache(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists(), "it is made when the first file is written"


def test_a_failure_leaves_nothing(tmp_path):
    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Cache(tmp_path / "made").tensors("walk", {}, [], fails)
    assert not (tmp_path / "made").exists()


def test_a_full_disk_loses_no_result(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert Cache(tmp_path / "made").tensors("walk", {}, [], Counted())["b"].item() == 1
    assert re.search(r"does not keep this result: .*could not be written: No space left on device", caplog.text)
    assert not (tmp_path / "made").exists()


def test_a_system_that_removes_no_open_file(tmp_path, monkeypatch):
    """Windows; filelock removes its file there after closing it."""

    def refuse(path, missing_ok=False):
        raise PermissionError(f"{path} is in use by another process")

    monkeypatch.setattr(Path, "unlink", refuse)
    found = Cache(tmp_path).tensors("walk", {}, [], Counted())
    assert found["b"].item() == 1
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_processes_that_want_the_same_compute_it_once(tmp_path):
    script = tmp_path / "wants.py"
    script.write_text(WANTS)
    folder, runs = tmp_path / "cache", tmp_path / "runs"
    wanting = [
        subprocess.Popen([sys.executable, str(script), str(folder), str(runs)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=300)[0].strip() for process in wanting]
    assert answers == ["7.0"] * 3
    assert runs.read_text() == "x"
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]


def test_without_a_folder_everything_is_computed():
    compute = Counted()
    for _ in range(2):
        Cache().tensors("walk", {}, [], compute)
    assert compute.runs == 2


def test_tensors_that_share_memory_are_stored(tmp_path):
    """A graph whose features are its teacher's logits, for example."""
    whole = torch.arange(6.0).view(3, 2)
    tensors = {"x": whole, "logits": whole, "part": whole[1:]}
    (tmp_path / "a.safetensors").write_bytes(sealed(tensors))
    found, _ = read_sealed(tmp_path / "a.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
