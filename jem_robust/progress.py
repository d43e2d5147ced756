"""Progress of long work: a bar with rate and time left on a terminal, plain lines otherwise."""

import sys
import time
from types import TracebackType
from typing import Any, Self

LINE_EVERY_SECONDS = 10.0


class Progress:
    """Counts work done towards `total` (in `unit`) and shows it on stderr while the block runs.

    show=False shows nothing. On a terminal it is a bar, elsewhere a line every ten seconds and at the end.
    """

    def __init__(self, total: float, description: str, unit: str = "it", show: bool = True, done: float = 0) -> None:
        self.total, self.description, self.unit, self.show = total, description, unit, show
        self.done = self.first = done
        self.figures = ""
        self._bar: Any = None

    def __enter__(self) -> Self:
        self._started = self._last_line = time.monotonic()
        if self.show and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.fields[rate]} eta", markup=False),
                progress.TimeRemainingColumn(elapsed_when_finished=True),
                progress.TextColumn("{task.fields[figures]}", markup=False),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.description, total=self.total, completed=self.done, rate="", figures=""
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.show and kind is None:
            self.total = self.done  # totals of attacks are estimates
            self._line()

    def advance(self, amount: float = 1, description: str | None = None, **figures: float) -> None:
        """Add work done; description renames the phase; figures are shown beside it, e.g. gap=0.1."""
        self.done += amount
        self.description = description or self.description
        if figures:
            self.figures = "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self.done, total=max(self.total, self.done),
                description=self.description, rate=self._rate_text(), figures=self.figures,
            )  # fmt: skip
        elif self.show and time.monotonic() - self._last_line >= LINE_EVERY_SECONDS:
            self._line()

    def note(self, text: str) -> None:
        """Write a line of its own above the bar or between the plain lines."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self.show:
            print(text, file=sys.stderr, flush=True)

    def _rate(self) -> float:
        return (self.done - self.first) / max(time.monotonic() - self._started, 1e-9)

    def _rate_text(self) -> str:
        return f"{self._rate():.3g} {self.unit}/s"

    def _line(self) -> None:
        self._last_line = time.monotonic()
        rate = self._rate()
        left = f"{max(self.total - self.done, 0) / rate:.0f} s left" if rate > 0 else "time left unknown"
        amount = f"{self.done:.6g}/{max(self.total, self.done):.6g}"
        print(
            f"{self.description}: {amount} {self._rate_text()}, {left}  {self.figures}".rstrip(),
            file=sys.stderr,
            flush=True,
        )
