"""Saving and loading students in the Hub's layout, and on a fake Hub in a folder: no network is used."""

import copy
import json
import shutil
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from saved_runs import save_run

import rbm
from rbm import MLPStudent, RbMStudent
from rbm.config import Config
from rbm.nn import pretrained as hub
from rbm.nn import saved_student
from rbm.nn.moe import MoEStudent
from rbm.nn.pretrained import HubMixin
from rbm.nn.students import CoHOpStudent, EnsembleStudent, MixtureStudent

SIZES = {"in_channels": 6, "hidden_channels": 8, "out_channels": 3}
STUDENTS = {
    "rbm": lambda: RbMStudent(6, 8, 3, num_experts=4, norm="batch", decay=0.5, input_attention=False),
    "mlp": lambda: MLPStudent(6, 8, out_channels=3, norm="layer"),
    "moe": lambda: MoEStudent(**SIZES, num_experts=4, noise=0.5),
    "ensemble": lambda: EnsembleStudent(3, **SIZES),
    "cohop": lambda: CoHOpStudent(**SIZES, num_layers=2),
}


@pytest.fixture(params=STUDENTS)
def student(request):
    return STUDENTS[request.param]().eval()


@pytest.fixture
def huggingface_hub():
    return pytest.importorskip("huggingface_hub")


@pytest.mark.usefixtures("huggingface_hub")
def test_to_a_folder_and_back(student, tmp_path):
    student.save_pretrained(tmp_path / "student")
    assert {path.name for path in (tmp_path / "student").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    x, kind = torch.randn(9, 6), type(student)
    torch.manual_seed(5)
    for loaded in (kind.from_pretrained(tmp_path / "student"), hub.load(str(tmp_path / "student"))):
        assert type(loaded) is kind
        assert not loaded.training
        assert torch.equal(loaded(x), student(x))
        assert loaded.state_dict().keys() == student.state_dict().keys()
    config = json.loads((tmp_path / "student" / "config.json").read_text())
    assert config["class"] == kind.__name__
    assert config["arguments"].items() >= {"hidden_channels": 8, "out_channels": 3}.items()


@pytest.mark.usefixtures("huggingface_hub")
def test_copies_keep_their_arguments(tmp_path):
    student = copy.deepcopy(STUDENTS["rbm"]()).eval()
    student.save_pretrained(tmp_path)
    loaded = RbMStudent.from_pretrained(tmp_path)
    assert [layer.decay for layer in loaded.layers] == [0.5, 0.5]
    assert all(layer.attention is None for layer in loaded.layers)


@pytest.mark.usefixtures("huggingface_hub")
def test_a_class_of_ones_own_may_read_tensors_as_it_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(saved_student, "STUDENTS", dict(saved_student.STUDENTS))
    monkeypatch.setattr(hub, "STUDENTS", saved_student.STUDENTS)

    class Mine(HubMixin, torch.nn.Linear):
        def __init__(self, in_channels, out_channels):
            super().__init__(in_channels, out_channels)
            self.scale = torch.ones(4).sum().item()  # which a tensor on the device "meta" does not have

    Mine(6, 3).save_pretrained(tmp_path)
    assert hub.load(tmp_path).scale == 4.0


@pytest.mark.usefixtures("huggingface_hub")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_and_device_change_no_number(student, tmp_path, dtype):
    student.save_pretrained(tmp_path)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            loaded = hub.load(str(tmp_path))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(student.state_dict()), rtol=0, atol=0)
    x = torch.randn(9, 6)
    assert torch.equal(loaded(x), student(x))


def test_two_threads_that_load_leave_all_warnings_as_they_were(tmp_path, monkeypatch):
    """``warnings.catch_warnings`` in a thread may restore the filters that another thread has set for itself."""
    folder = save_run(tmp_path / "run", 6)
    make, second_is_in, first_is_done = RbMStudent.__init__, threading.Event(), threading.Event()

    def slow(self, *args, **options):
        """Both threads are in here before the first ends, which is before the second does."""
        make(self, *args, **options)
        if threading.current_thread() is second:
            second_is_in.set()
            first_is_done.wait(60)
        else:
            if not second.is_alive():
                second.start()
            second_is_in.wait(60)

    second = threading.Thread(target=lambda: rbm.load(folder))
    monkeypatch.setattr(RbMStudent, "__init__", slow)
    before = list(warnings.filters)
    rbm.load(folder)
    first_is_done.set()
    second.join(60)
    assert warnings.filters == before


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from rbm.datasets import load_dataset

    folder = tmp_path_factory.mktemp("runs") / "digits"
    quick = {"max_epochs": 2}
    config = Config().updated({"teacher": quick, "mlp": quick, "rbm": {**quick, "pretrain_epochs": 1}})
    config = config.updated({"dataset": "/home/somebody/rings.npz", "encoding": {"deepwalk": False}})
    return rbm.distill(load_dataset("digits"), config=config, keep="rbm", folder=folder), folder


def test_card_has_the_figures_of_its_run(huggingface_hub, run, tmp_path):
    result, folder = run
    for method, student in result.students.items():
        student.save_pretrained(tmp_path / method, run=folder)
        card = huggingface_hub.ModelCard.load(tmp_path / method / "README.md")
        (figure,) = card.data.eval_results
        assert figure.metric_value == pytest.approx(result.summary[method]["test_accuracy"], abs=1e-6)
        assert f"{result.summary[method]['test_accuracy']:.2%}" in card.text
        assert f"the method `{method}`; *test* means test nodes" in card.text
        assert "rings, transductive" in card.text
        assert "somebody" not in card.content
        assert f'rbm.hub.load("{tmp_path / method}")' in card.text


@pytest.mark.usefixtures("huggingface_hub")
def test_no_student_gets_figures_of_another(run, tmp_path):
    result, folder = run
    other = copy.deepcopy(result.student)
    with torch.no_grad():
        other.layers[0].weight[0, 0, 0] += 1
    with pytest.raises(ValueError, match="none of its students has these weights"):
        other.save_pretrained(tmp_path / "other", run=folder)
    assert not (tmp_path / "other").exists()
    with pytest.raises(FileNotFoundError, match=r"holds no config.yaml: it is no run folder"):
        other.save_pretrained(tmp_path / "other", run=tmp_path)


@pytest.mark.usefixtures("huggingface_hub")
def test_a_card_that_somebody_wrote_stays_until_a_run_gives_figures(run, tmp_path):
    result, folder = run
    (tmp_path / "README.md").write_text("mine")
    result.student.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    result.student.save_pretrained(tmp_path, run=folder)
    assert "Figures" in (tmp_path / "README.md").read_text()


@pytest.fixture
def fake_hub(huggingface_hub, monkeypatch, tmp_path):
    """A folder as the Hub, which replaces the library's four functions."""
    calls = []

    class HfApi:
        def __init__(self, token=None):
            calls.append(("token", token))

        def create_repo(self, repo_id, *, private, exist_ok):
            assert exist_ok
            calls.append(("create", repo_id, private))

        def file_exists(self, repo_id, filename, *, revision):
            return (tmp_path / repo_id / filename).is_file()

        def upload_folder(self, *, repo_id, folder_path, revision, commit_message):
            shutil.copytree(folder_path, tmp_path / repo_id, dirs_exist_ok=True)
            return SimpleNamespace(commit_url=f"hub/{repo_id}/{revision}/{commit_message}")

    def download(repo_id, filename, *, revision, token, cache_dir):
        calls.append(("download", repo_id, filename, revision, token))
        return str(tmp_path / repo_id / filename)

    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return tmp_path, calls


def test_to_the_hub_and_back(fake_hub, run):
    place, calls = fake_hub
    result, folder = run
    url = result.student.push_to_hub("me/digits", run=folder, private=True, token="secret", revision="main")
    assert url == "hub/me/digits/main/Upload student"
    assert calls == [("token", "secret"), ("create", "me/digits", True)]
    assert 'rbm.hub.load("me/digits")' in (place / "me/digits/README.md").read_text()
    loaded = RbMStudent.from_pretrained("me/digits", revision="v1", token="secret")
    x = result.student_inputs()
    assert torch.equal(loaded(x), result.student(x))
    assert calls[2] == ("download", "me/digits", "config.json", "v1", "secret")

    result.student.push_to_hub("me/digits")
    assert "Figures" in (place / "me/digits/README.md").read_text(), "the card on the Hub stays"


@pytest.mark.usefixtures("huggingface_hub")
def test_faults(tmp_path):
    STUDENTS["rbm"]().eval().save_pretrained(tmp_path / "good")
    description = json.loads((tmp_path / "good" / "config.json").read_text())
    del description["checksum"]  # as after editing by hand
    config = json.dumps(description)

    def spoilt(name, text):
        shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True)
        (tmp_path / "bad" / name).write_text(text)
        return tmp_path / "bad"

    with pytest.raises(ValueError, match=r"describes a RbMStudent, expected a MLPStudent; rbm.hub.load takes any"):
        MLPStudent.from_pretrained(tmp_path / "good")
    with pytest.raises(ValueError, match=r"model.safetensors is not a readable safetensors file"):
        hub.load(spoilt("model.safetensors", "no"))
    with pytest.raises(ValueError, match=r"does not fit RbMStudent: [^$]*size mismatch"):
        hub.load(spoilt("config.json", config.replace('"hidden_channels": 8', '"hidden_channels": 9')))
    for text in ("no", "[]", '{"class": "Trap", "arguments": {}}', '{"class": "RbMStudent"}'):
        with pytest.raises(ValueError, match=r"config.json does not describe a student of this package"):
            hub.load(spoilt("config.json", text))
    with pytest.raises(ValueError, match=r"holds arguments that RbMStudent does not take: .*colour"):
        hub.load(spoilt("config.json", config.replace('"decay"', '"colour"')))
    (tmp_path / "good" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"good holds no model.safetensors"):
        hub.load(tmp_path / "good")
    modules = MixtureStudent(STUDENTS["rbm"]().layers, "none")
    with pytest.raises(TypeError, match="was made from modules"):
        modules.save_pretrained(tmp_path / "modules")


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    student = STUDENTS["mlp"]()
    for call in (
        lambda: student.save_pretrained(tmp_path / "student"),
        lambda: student.push_to_hub("me/student"),
        lambda: MLPStudent.from_pretrained("me/student"),
    ):
        with pytest.raises(ModuleNotFoundError, match=r"huggingface_hub: pip install 'rbm-kernels\[hub\]'"):
            call()
    assert not (tmp_path / "student").exists()


@pytest.mark.usefixtures("huggingface_hub")
def test_a_run_folder_and_a_folder_as_on_the_hub_load_alike(run, tmp_path_factory):
    result, folder = run
    saved = tmp_path_factory.mktemp("saved")
    result.student.save_pretrained(saved)
    students = [load(place) for load in (rbm.load, rbm.hub.load) for place in (folder, saved)]
    x = result.student_inputs()
    assert all(torch.equal(student(x), result.student(x)) for student in students)
    descriptions = [json.loads((folder / "student.json").read_text()), json.loads((saved / "config.json").read_text())]
    assert descriptions[0].pop("method") == result.method
    assert descriptions[0].pop("encodings") is None
    assert descriptions[0].pop("files").keys() == {f"{result.method}.safetensors"}
    assert set(descriptions[0].pop("students")) == set(result.students) - {result.method}
    assert descriptions[0] == descriptions[1]
