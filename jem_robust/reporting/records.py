"""result.json and adversarials.npz: written whole or not at all, read without unpickling."""

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jem_robust.files import replacing

SCHEMA_VERSION = 1
PACKAGES = ("jem-robust", "torch", "numpy", "scipy", "foolbox", "adversarial-robustness-toolbox", "torchattacks")


def versions() -> dict[str, str]:
    """Versions of Python, the machine and the packages that a result depends on."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record; arrays become lists, and numbers JSON has no word for (NaN, infinity) become null."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_plain(record), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write arrays into a compressed .npz."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_result(out: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The record and the arrays of a result folder. Raises ValueError for what is missing or of another schema."""
    try:
        record: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
        with np.load(out / "adversarials.npz", allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected a result folder with result.json and adversarials.npz, got {out} ({error})"
        ) from error
    found = record.get("schema_version") if isinstance(record, dict) else None
    if found != SCHEMA_VERSION:
        raise ValueError(f"expected result schema {SCHEMA_VERSION} in {out}, got {found!r}: run the attack again")
    return record, arrays


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value
