"""What attacks run on: a callable images -> logits with bounds, possibly random.

A model may bring `bounds`, `deterministic` and `draw(images, image_ids, draw_ids, purpose, seed)`, and `probe(images)`
to be called before `deterministic` is believed; what it lacks is
supplied here: bounds (0, 1), determinism by probing once, draws by calling it under a seeded global RNG.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

PURPOSES = ("plain", "frozen", "start", "attack", "select", "judge")
PROBE_IMAGES = 4
PROBE_DRAWS = 2


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

    A module computes in eval mode. Every draw is a call of its own, since a model may share noise within a call.
    probe: some images on which determinism is tried out, unless the model says itself; `probed` says how many were.
    """

    def __init__(self, model: Callable[[Tensor], Tensor], probe: Tensor) -> None:
        self.model = model
        low, high = getattr(model, "bounds", (0.0, 1.0))
        self.bounds = (float(low), float(high))
        known = getattr(model, "deterministic", None)
        self.probed = 0 if isinstance(known, bool) else min(len(probe), PROBE_IMAGES)
        self.deterministic = bool(known) if isinstance(known, bool) else self._agrees(probe[: self.probed])

    def _agrees(self, images: Tensor) -> bool:
        if len(images) == 0:
            return True
        ids = torch.arange(len(images), device=images.device)
        with torch.no_grad():
            first, second = (self.draw(images, ids, torch.full_like(ids, d), "plain", 0) for d in range(PROBE_DRAWS))
        return torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))

    def draw(self, images: Tensor, image_ids: Tensor, draw_ids: Tensor, purpose: str, seed: int) -> Tensor:
        """One call of the model a draw id; the same arguments give the same noise."""
        draws = sorted(set(draw_ids.tolist()))
        if len(draws) < 2:
            return self._call(images, [seed % 2**64, PURPOSES.index(purpose), *_digest(image_ids), *draws])
        parts = [(draw_ids == d).nonzero().squeeze(1) for d in draws]
        logits = [
            self.draw(images[part], image_ids[part], draw_ids[part], purpose, seed)  # one id only: no deeper
            for part in parts
        ]
        return torch.cat(logits)[torch.cat(parts).argsort()]

    def _call(self, images: Tensor, key: list[int]) -> Tensor:
        seed = int(np.random.SeedSequence([k % 2**64 for k in key]).generate_state(1, np.uint64)[0] >> np.uint64(1))
        on_gpu = images.device.type == "cuda"
        with torch.random.fork_rng(devices=[images.device] if on_gpu else []), _eval_mode(self.model):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach into every GPU as well
            if on_gpu:
                with torch.cuda.device(images.device):
                    torch.cuda.manual_seed(seed)
            return self.model(images)


@contextmanager
def _eval_mode(model: object) -> Iterator[None]:
    training = [m for m in model.modules() if m.training] if isinstance(model, nn.Module) else []
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _digest(ids: Tensor) -> list[int]:
    values = ids.to(torch.int64)
    places = torch.arange(1, len(values) + 1, device=values.device)
    return [len(values), int((values * places).sum()), int(values.sum())]


def as_target(model: Any, images: Tensor) -> Target:
    """The model itself where it satisfies the protocol, else wrapped. TypeError for what cannot be called."""
    if all(hasattr(model, name) for name in ("bounds", "deterministic", "draw")):
        if hasattr(model, "probe"):
            model.probe(images)
        return model  # type: ignore[no-any-return]
    if not callable(model):
        raise TypeError(f"expected a callable images -> logits, got {type(model).__name__}: pass the model itself")
    return CallableTarget(model, images)
