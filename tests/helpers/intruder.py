"""A pickle that runs code if the unpickler allows it."""

from pathlib import Path


class Intruder:
    """Unpickled by an ordinary unpickler, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)
