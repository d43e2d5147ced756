"""The divergence guard: sees a run leave its healthy range early and knows the states to go back to."""

from collections import deque
from copy import deepcopy
from math import isfinite
from typing import Any

GAP_MEMORY = 0.95
SNAPSHOTS = 2


class DivergenceError(RuntimeError):
    """Training left its healthy range more often than retries allow."""


class DivergenceGuard:
    """Watches loss and energy gap, keeps snapshots of healthy states.

    limit: largest healthy |gap| = |log p(data) - log p(samples)|, smoothed over about 20 iterations. NaN and infinity
    are divergence whatever the limit. The oldest snapshot is the one to go back to: the newest may already be ill.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.smoothed = 0.0
        self._snapshots: deque[dict[str, Any]] = deque(maxlen=SNAPSHOTS)

    def healthy(self, loss: float, gap: float = 0.0) -> bool:
        """Take the figures of one iteration; False when the run is leaving."""
        if not (isfinite(loss) and isfinite(gap)):
            return False
        self.smoothed = GAP_MEMORY * self.smoothed + (1 - GAP_MEMORY) * gap
        return abs(self.smoothed) <= self.limit and abs(gap) <= 4 * self.limit

    @property
    def calm(self) -> bool:
        """Whether the state is worth keeping: well within the range, not just inside it."""
        return abs(self.smoothed) <= self.limit / 2

    def keep(self, state: dict[str, Any]) -> None:
        """Remember a copy of a state."""
        self._snapshots.append(deepcopy(state))

    @property
    def latest(self) -> dict[str, Any]:
        """The newest remembered state."""
        return self._snapshots[-1]

    def go_back(self) -> dict[str, Any]:
        """The oldest remembered state, on which further attempts build; forgets the others."""
        state = self._snapshots[0]
        self._snapshots.clear()
        self._snapshots.append(state)
        self.smoothed = 0.0
        return deepcopy(state)
