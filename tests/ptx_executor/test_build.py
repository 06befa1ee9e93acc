"""The folder in which the executor's C++ is compiled."""

from pathlib import Path

import pytest
from torch.utils import cpp_extension

from ptx_executor import build


def test_extensions_are_where_the_environment_says(monkeypatch, tmp_path):
    """``TORCH_EXTENSIONS_DIR``, as for all extensions of PyTorch: a home folder may be read-only."""
    folders = []
    monkeypatch.setattr(cpp_extension, "load", lambda *_, build_directory, **__: folders.append(Path(build_directory)))
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path / "home"))
    for name in ("here", ""):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / name) if name else "")
        build.core.__wrapped__()
    assert [folder.parent for folder in folders] == [tmp_path / "here", tmp_path / "home"]
    assert all(folder.is_dir() for folder in folders)


def test_compiled_once_for_every_checkout_and_after_a_kill(monkeypatch, tmp_path):
    """A process killed during compilation leaves PyTorch's lock, for which another process would wait forever."""
    compiled = []

    def load(name, sources, build_directory, **options):
        folder = Path(build_directory)
        assert not (folder / "lock").exists()
        (folder / "lock").touch()
        compiled.append(folder)
        if len(compiled) == 1:
            raise KeyboardInterrupt
        return "compiled"

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(build, "_imported", lambda library: library.name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        build.core.__wrapped__()
    assert [build.core.__wrapped__() for _ in range(2)] == ["compiled", "ptx_executor_core.so"]
    assert len(compiled) == 2
