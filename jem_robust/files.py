"""Writing files so that a reader never sees half of one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` (same suffix) that takes its place when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem[:100]}-{uuid4().hex}{path.suffix}")
    temporary.touch(0o666, exist_ok=False)
    mode = temporary.stat().st_mode  # what the umask left; some writers make a private file of their own
    try:
        yield temporary
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
