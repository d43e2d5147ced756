"""Noise as a pure function of (seed, purpose, image id, draw, chain, step): no state, no global RNG.

The generator is Philox4x32-10 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
vectorised over rows with torch integers, followed by Box-Muller. Being counter-based it gives a row the same noise in
whatever batch, order or process it is computed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import pi
from operator import index
from typing import Any, Literal, TypeVar
from warnings import warn

import torch
from torch import Tensor

Purpose = Literal["plain", "frozen", "start", "attack", "select", "judge"]
PURPOSES: dict[str, int] = {name: i for i, name in enumerate(("plain", "frozen", "start", "attack", "select", "judge"))}

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
Words = tuple[Tensor, Tensor, Tensor, Tensor]
Module = Callable[[Tensor], Any]
Owner = TypeVar("Owner")


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10: four counter words and two key words, int64 tensors holding 0..2^32-1 -> four random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps, so the low 64 bits of the product are right; the shift's sign bits are masked away.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True)
class NoiseKey:
    """Which noise the rows of a batch get.

    seed: any int (its low 64 bits count). purpose: one of PURPOSES. ids, draws, chains: int64 (R,): image, draw and
    chain of each row. Raises ValueError for an unknown purpose or lengths that differ.
    """

    seed: int
    purpose: str
    ids: Tensor
    draws: Tensor
    chains: Tensor

    def __post_init__(self) -> None:
        if self.purpose not in PURPOSES:
            raise ValueError(f"expected a purpose out of {list(PURPOSES)}, got {self.purpose!r}")
        shapes = [tuple(t.shape) for t in (self.ids, self.draws, self.chains)]
        if len(set(shapes)) > 1 or self.ids.dim() != 1:
            raise ValueError(f"expected ids, draws and chains of one length, got shapes {shapes}")

    @classmethod
    def for_images(cls, seed: int, purpose: str, ids: Tensor, draws: Tensor, chains: int) -> "NoiseKey":
        """`chains` rows an image beside each other; ids and draws int64 (N,)."""
        each = torch.arange(chains, device=ids.device).repeat(len(ids))
        return cls(seed, purpose, ids.repeat_interleave(chains), draws.repeat_interleave(chains), each)

    def rows(self, part: slice) -> "NoiseKey":
        """The key of some of the rows."""
        return replace(self, ids=self.ids[part], draws=self.draws[part], chains=self.chains[part])

    @cached_property
    def words(self) -> Words:
        """128 random bits a row that stand for everything but the step."""
        high = ((self.draws >> 32) & 0xFFFFFF) | (PURPOSES[self.purpose] << 24)
        counter = (self.ids & _MASK, (self.ids >> 32) & _MASK, self.draws & _MASK, high)
        w0, w1, w2, w3 = philox(counter, _seed_words(self.seed, self.ids))
        return w0, w1, w2 ^ self.chains, w3

    def normal(self, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Standard normal noise (R, *shape) of one step (0 is the chain's start)."""
        w0, w1, w2, w3 = (w.unsqueeze(1) for w in self.words)
        size = int(torch.Size(shape).numel())
        block = torch.arange(-(-size // 4), device=self.ids.device).unsqueeze(0)
        # The words are random already, so xor-ing small numbers into them keeps different rows apart.
        bits = philox((block, w1 ^ step, w2, w3), (w0, w1))
        return _box_muller(bits)[:, :size].to(dtype).reshape(len(self.ids), *shape)

    def global_seed(self, step: int = 0) -> int:
        """One seed for the whole batch, for networks that draw from torch's global generator."""
        words = self.words
        return int(sum(int((w * (i + 1)).sum()) << (7 * i) for i, w in enumerate(words)) + step) % 2**63


def as_seed(seed: Any) -> int:
    """A seed as a plain int, numpy's integers included. Raises TypeError for anything else."""
    try:
        return index(seed)
    except TypeError as error:
        raise TypeError(f"expected an integer seed, got {seed!r}: pass a whole number") from error


def _seed_words(seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    seed = as_seed(seed)
    return torch.full_like(like, seed & _MASK), torch.full_like(like, (seed >> 32) & _MASK)


def _box_muller(bits: Words) -> Tensor:
    """Four words -> four normals side by side; in float64, so that vector width cannot show in float32 results."""
    a, b, c, d = (w.to(torch.float64) for w in bits)
    radius_a = torch.log((a + 0.5) * 2.0**-32).mul_(-2).sqrt_()
    radius_c = torch.log((c + 0.5) * 2.0**-32).mul_(-2).sqrt_()
    angle_b, angle_d = b * (2 * pi * 2.0**-32), d * (2 * pi * 2.0**-32)
    return torch.cat(
        [radius_a * angle_b.cos(), radius_a * angle_b.sin(), radius_c * angle_d.cos(), radius_c * angle_d.sin()], 1
    )


class SeedStack(AbstractContextManager[Owner]):
    """A block during which a seed tops a stack; it gives `owner` and may be entered again, also from within."""

    def __init__(self, owner: Owner, stack: list[int], seed: int) -> None:
        self.owner, self.stack, self.seed = owner, stack, as_seed(seed)

    def __enter__(self) -> Owner:
        self.stack.append(self.seed)
        return self.owner

    def __exit__(self, *_: object) -> None:
        self.stack.pop()


@contextmanager
def global_rng(seed: int | None, device: torch.device) -> Iterator[None]:
    """Run a block with torch's global RNG seeded, and put its state back afterwards; other devices are not touched."""
    before = global_rng_state(device)
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(before[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(before[1], device)


def global_rng_state(device: torch.device) -> list[Tensor]:
    """States of the global generators that a network on this device can draw from: the CPU's and the device's own."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


class SeededCalls:
    """Calls modules with noise of ours where they draw from torch's global RNG, which the first call finds out."""

    def __init__(self) -> None:
        self.random: bool | None = None  # unknown at first

    def __call__(self, module: Module, modules: Iterable[Module], x: Tensor, key: NoiseKey | None, step: int) -> Any:
        """One of the modules on rows (R, ...). No rows are stood in for by one, as not every network takes none."""
        rows = x if len(x) else torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        seeded: AbstractContextManager[None] = nullcontext()
        if self.probe(modules, rows):
            seeded = global_rng(key.global_seed(step) if key else 0, x.device)
        with seeded:
            out = module(rows)
        return out if len(x) or not isinstance(out, Tensor) else out[:0]

    def probe(self, modules: Iterable[Module], x: Tensor) -> bool:
        """Whether a module draws from torch's global RNG, tried once on one row; then there is a warning, too."""
        if self.random is None:
            before = global_rng_state(x.device)
            with global_rng(None, x.device):
                for module in modules:
                    module(x[:1].detach().clone())
                self.random = not all(map(torch.equal, before, global_rng_state(x.device)))
            if self.random:
                warn(
                    "the network draws from torch's global random numbers: it gets seeded ones instead, and its "
                    "results may depend on the batch size; switch its own randomness off if you can",
                    stacklevel=2,
                )
        return self.random
