"""Find the folders of raw files, and download missing files."""

import tempfile
from pathlib import Path

import torch_geometric.data
import torch_geometric.datasets

from rbm.datasets.registry import DatasetInfo
from rbm.utils.files import as_path


def find_raw_folder(info: DatasetInfo, root: str | Path | None, *, download: bool = False) -> Path:
    """Find the first of ``info.folders`` below ``root`` that contains all of ``info.raw_files``.

    Args:
        info: the dataset.
        root: folder of datasets; may be read-only.
        download: fetch missing files into ``root``, which must then be writable.

    Raises:
        ValueError: no root is given.
        FileNotFoundError: the root or raw files are missing.
        RuntimeError: the download failed.
    """
    folder = info.folders[0]
    if root is None:
        raise ValueError(
            f"root: got None, but {info.name} is read from files; pass the folder that holds {folder} "
            "(--root FOLDER), or use the dataset 'digits', which needs no files"
        )
    root = as_path("root", root)
    candidates = [root / name for name in info.folders]
    for candidate in candidates:
        if not _missing(info, candidate):
            return candidate
    if download:
        _download(info, root)
        return candidates[0]
    if not root.is_dir():
        problem, expected = f"the folder {root} does not exist", f"a folder that holds {folder}"
    else:
        present = min(candidates, key=lambda path: len(_missing(info, path)))
        layout = "OGB's" if info.url else "PyG's"
        problem = f"{present} lacks {', '.join(_missing(info, present))}"
        expected = f"the raw files of {layout} layout there"
    raise FileNotFoundError(
        f"root: {problem}; {info.name} expects {expected}. {info.note}Pass another folder (--root FOLDER), "
        "or fetch the files into it (download=True)"
    )


def _missing(info: DatasetInfo, folder: Path) -> list[str]:
    return [file for file in info.raw_files if not (folder / file).is_file()]


def _download(info: DatasetInfo, root: Path) -> None:
    folder = root / info.folders[0]
    try:
        if info.url:
            _download_archive(info.url, folder)
        else:
            # force_reload makes PyG process the downloaded files instead of opening a processed file of unknown origin.
            dataset = getattr(torch_geometric.datasets, info.pyg_class)
            dataset(str(root / info.pyg_class), info.pyg_name, force_reload=True)
        if missing := _missing(info, folder):
            raise OSError(f"{folder} still lacks {', '.join(missing)}")
    # An archive cut short is no zip file, and PyG processes what it fetched, with packages that may not be installed;
    # only the raw files are needed, and their reader tells what is wrong with them.
    except Exception as error:
        if not _missing(info, folder):
            return
        raise RuntimeError(
            f"download: could not fetch {info.name} into {root}: {error}. Check the network and that the folder is "
            f"writable, or put {', '.join(info.raw_files)} into {folder} by hand"
        ) from error


def _download_archive(url: str, folder: Path) -> None:
    """Download an archive that contains one folder and unpack it as ``folder``; a failure leaves nothing there."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists but lacks files; move it away first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        archive = torch_geometric.data.download_url(url, scratch, log=False)
        torch_geometric.data.extract_zip(archive, str(Path(scratch) / "unpacked"), log=False)
        (unpacked,) = (path for path in (Path(scratch) / "unpacked").iterdir() if path.is_dir())
        unpacked.rename(folder)
