"""What all benchmarks share: interleaved medians, the unit F, peak memory in a fresh process, a record of it all."""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jem_robust.reporting.records import versions

RESULTS = Path(__file__).parent / "results"
# glibc grows its heap around what lives longer than a step; large blocks in pages of their own show what is in use.
STEADY = {"MALLOC_MMAP_THRESHOLD_": "1000000"}


def interleaved(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(repeats + 1):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def forward(network: nn.Module, x: Tensor) -> Callable[[], object]:
    """One forward without gradients, whose time is len(x) F."""

    def run() -> object:
        with torch.no_grad():
            return network(x)

    return run


def peak_bytes(arguments: list[str], limit: int | None = None) -> int | None:
    """What a fresh process, this script with these arguments, says it took at its peak; None where it ran out.

    limit: bytes of data the process may have.
    """
    code = [sys.executable, sys.argv[0], *arguments]
    set_limit = (lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))) if limit else None
    done = subprocess.run(code, capture_output=True, text=True, env={**os.environ, **STEADY}, preexec_fn=set_limit)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        if limit and ("memory" in last[0].lower() or done.returncode < 0):
            return None
        raise RuntimeError(f"expected a figure from {arguments}, got: {last[0]}")
    return int(done.stdout.strip().splitlines()[-1])


def print_growth(run: Callable[[], object]) -> None:
    """Print the bytes by which the process grows at its peak while it runs (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water()
    run()
    print(_high_water() - before)


def _high_water() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def machine() -> dict[str, Any]:
    """Where and with what the figures came about."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(), "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2), **versions(),
    }  # fmt: skip


def record(benchmark: str, rows: list[dict[str, Any]]) -> None:
    """Append rows to benchmarks/results/<benchmark>.jsonl, with machine and time."""
    RESULTS.mkdir(exist_ok=True)
    entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "rows": rows}
    with (RESULTS / f"{benchmark}.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows of the same keys as a table."""
    texts = [list(rows[0]), *([_text(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for text in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(text, widths, strict=True)).rstrip(), flush=True)


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def parts_and_limit(description: str | None, parts: Iterable[str], counts: str) -> tuple[list[str], int | None]:
    """The parts to run and the number of images, None for the usual `counts`, from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(parts), help="comma-separated, of %(default)s")
    parser.add_argument("--limit", type=int, help=f"images, instead of {counts}")
    given = parser.parse_args()
    return given.parts.split(","), given.limit
