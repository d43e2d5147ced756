"""The folder a command writes to."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Make sure before a long run that results can be written; leave no empty folder behind if the run fails.

    Raises ValueError where they cannot.
    """
    existed = out.is_dir()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        if not os.access(out, os.W_OK):
            raise PermissionError("no write permission")
    except OSError as error:
        raise ValueError(f"expected a folder that can be written, got {out} ({error}): pass another --out") from error
    try:
        yield
    except BaseException:
        if not existed and not any(out.iterdir()):
            out.rmdir()
        raise
