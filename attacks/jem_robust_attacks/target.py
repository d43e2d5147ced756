"""What attacks run on: a callable images -> logits with bounds, possibly random.

A model may bring `bounds`, `deterministic` and `draw(images, image_ids, draw_ids, purpose, seed)`; what it lacks is
supplied here: bounds (0, 1), determinism by probing once, draws by calling it under a seeded global RNG.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

PURPOSES = ("plain", "frozen", "start", "attack", "select", "judge")


class Target(Protocol):
    """The attack protocol."""

    bounds: tuple[float, float]

    @property
    def deterministic(self) -> bool:
        """Whether two draws on one image agree."""
        ...

    def draw(self, images: Tensor, image_ids: Tensor, draw_ids: Tensor, purpose: str, seed: int) -> Tensor:
        """Logits (N, K) of one draw a row, ids int64 (N,); differentiable in images."""
        ...


class CallableTarget:
    """Any callable images (N, ...) -> logits (N, K) as a Target. Noise it takes from torch's global RNG is seeded here.

    probe: some images on which determinism is tried out, unless the model says itself.
    """

    def __init__(self, model: Callable[[Tensor], Tensor], probe: Tensor) -> None:
        self.model = model
        low, high = getattr(model, "bounds", (0.0, 1.0))
        self.bounds = (float(low), float(high))
        known = getattr(model, "deterministic", None)
        self.deterministic = bool(known) if isinstance(known, bool) else self._agrees(probe[:4])

    def _agrees(self, images: Tensor) -> bool:
        if len(images) == 0:
            return True
        ids = torch.arange(len(images), device=images.device)
        with torch.no_grad():
            first, second = (self.draw(images, ids, torch.full_like(ids, d), "plain", 0) for d in (0, 1))
        return torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))

    def draw(self, images: Tensor, image_ids: Tensor, draw_ids: Tensor, purpose: str, seed: int) -> Tensor:
        """One call of the model; the same arguments give the same noise."""
        words = [seed % 2**64, PURPOSES.index(purpose), *_digest(image_ids), *_digest(draw_ids)]
        devices = [images.device] if images.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1)))
            return self.model(images)


def _digest(ids: Tensor) -> list[int]:
    values = ids.to(torch.int64)
    places = torch.arange(1, len(values) + 1, device=values.device)
    return [len(values), int((values * places).sum()) % 2**64, int(values.sum()) % 2**64]


def as_target(model: Any, images: Tensor) -> Target:
    """The model itself where it satisfies the protocol, else wrapped. TypeError for what cannot be called."""
    if all(hasattr(model, name) for name in ("bounds", "deterministic", "draw")):
        return model  # type: ignore[no-any-return]
    if not callable(model):
        raise TypeError(f"expected a callable images -> logits, got {type(model).__name__}: pass the model itself")
    return CallableTarget(model, images)
