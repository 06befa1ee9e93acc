"""Where the executor's part in C++ is compiled."""

from pathlib import Path

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
