"""The JEM-k classifier: images in [0, 1] -> chains -> refinement -> logits. Random, differentiable in images."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import isfinite
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jem_robust import energy as energy_functions
from jem_robust.gradients import GRADIENTS, Chain, Spent, graph_bytes, quiet, refine_rows
from jem_robust.images import check_images, check_labels
from jem_robust.langevin import Refinement
from jem_robust.lean import Lean
from jem_robust.randomness import NoiseKey, SeededCalls, SeedStack, as_seed

MEMORY = 2**30
MICRO_BATCH = 64
ROUNDING = {"float32": 1e-5, "bf16": 0.01}  # relative errors of logits that batch size or precision may cause


class JEMClassifier(nn.Module):
    """A network behind its SGLD refinement (Grathwohl et al. 2020), for measuring and attacking, not for training.

    network: images (N, C, H, W) in `input_range` -> logits (N, K). refinement: settings of the chain.
    energy: module with log p(x), (N,), that drives the refinement instead of logsumexp of the network's logits.
    aggregate: "logits" (mean over chains), "probabilities" (log of the mean softmax) or "vote" (log of vote shares).
    gradient: "exact" or "straight-through". seed: of the plain noise stream. input_shape (C, H, W), num_classes:
    checked where given. memory: bytes that graphs of one call may take. precision: "float32" or "bf16", in which calls
    that record a gradient compute; others always keep the network's own. ValueError on settings without sense.
    """

    bounds = (0.0, 1.0)

    def __init__(
        self, network: nn.Module, refinement: Refinement | None = None, input_range: tuple[float, float] = (-1.0, 1.0),
        energy: nn.Module | None = None, aggregate: str = "logits", gradient: str = "exact", seed: int = 0, *,
        input_shape: tuple[int, ...] | None = None, num_classes: int | None = None, memory: int = MEMORY,
        card: dict[str, Any] | None = None, precision: str = "float32",
    ) -> None:  # fmt: skip
        super().__init__()
        low, high = (float(v) for v in input_range)
        if not (isfinite(low) and isfinite(high) and low < high):
            raise ValueError(f"expected a finite input range (low, high), low < high, got {input_range}: fix it")
        known = energy_functions.AGGREGATES
        if aggregate not in known:
            raise ValueError(f"expected aggregate out of {known}, got {aggregate!r}: pass one of them")
        if gradient not in GRADIENTS:
            raise ValueError(f"expected gradient out of {GRADIENTS}, got {gradient!r}; transfer is an attack's name")
        if precision not in ROUNDING:
            raise ValueError(f"expected precision out of {sorted(ROUNDING)}, got {precision!r}: pass one of them")
        _check_type("network", network, nn.Module)
        _check_type("energy", energy, (nn.Module, type(None)))
        _check_type("refinement", refinement, (Refinement, type(None)))
        self.network, self.energy = network, energy
        if precision != "float32" and self.dtype == torch.float64:
            raise ValueError(f"expected a float32 network for precision {precision!r}, got float64: use .float()")
        self.refinement = refinement or Refinement()
        self.input_range = (low, high)
        self.aggregate, self.gradient, self.seed, self.memory = aggregate, gradient, as_seed(seed), memory
        self.input_shape = None if input_shape is None else tuple(input_shape)
        self.num_classes, self.card, self.precision = num_classes, card or {}, precision
        self.spent = Spent()
        self._chains = self.refinement.chains
        self._position = 0
        self._frozen: list[int] = []
        self._calls = SeededCalls()
        self._row_bytes: dict[Any, int] = {}  # by shape and type of a row

    def extra_repr(self) -> str:
        """Settings for the module's printout."""
        return f"{self.refinement}, {self.input_range=}, {self.aggregate=}, {self.gradient=}".replace("self.", "")

    # Views

    def _view(self, refinement: Refinement, gradient: str, precision: str) -> "JEMClassifier":
        view = JEMClassifier(
            self.network, refinement, self.input_range, self.energy, self.aggregate, gradient, self.seed,
            input_shape=self.input_shape, num_classes=self.num_classes, memory=self.memory, card=self.card,
            precision=precision,
        )  # fmt: skip
        view.training, view.spent, view._calls = self.training, self.spent, self._calls
        view._chains = self._chains if refinement.steps == 0 else refinement.chains
        return view

    def with_refinement(self, **changes: Any) -> "JEMClassifier":
        """Another view of the same network; keywords of Refinement. steps=0 also drops start noise and extra chains."""
        if self.refinement.steps == 0 and changes.get("steps", 0) and "chains" not in changes:
            changes = {**changes, "chains": self._chains}  # those the steps=0 view put aside
        return self._view(self.refinement.updated(**changes), self.gradient, self.precision)

    def with_gradient(self, gradient: str) -> "JEMClassifier":
        """Another view of the same network with another gradient estimator."""
        return self._view(self.refinement, gradient, self.precision)

    def with_precision(self, precision: str) -> "JEMClassifier":
        """Another view of the same network whose gradients are computed in "float32" or "bf16"."""
        return self._view(self.refinement, self.gradient, precision)

    @property
    def rounding(self) -> float:
        """Relative error that the logits of a call with gradients may have."""
        return ROUNDING[self.precision]

    # Noise

    def reseed(self, seed: int) -> Self:
        """Restart the plain noise stream."""
        self.seed, self._position = as_seed(seed), 0
        return self

    def frozen_noise(self, seed: int = 0) -> AbstractContextManager[Self]:
        """Within the block row i always gets noise (seed, i): a deterministic function. Re-entrant."""
        return SeedStack(self, self._frozen, seed)

    @property
    def deterministic(self) -> bool:
        """Whether two calls on one image agree.

        A network with randomness of its own is found out here if `input_shape` is known, else by `probe` or a call.
        """
        if self.input_shape is not None:
            self.probe(torch.zeros(1, *self.input_shape, device=self.device))
        return bool(self._frozen) or not (self.refinement.random or self._calls.random)

    @property
    def draws_globally(self) -> bool:
        """Whether the network was found to draw from torch's global random numbers."""
        return bool(self._calls.random)

    def probe(self, images: Any) -> None:
        """Find out on one image whether the network has randomness of its own, unless that is known already."""
        if self._calls.random is None and len(images):
            with self._computing():
                self._calls.probe(self._driven(), self._scaled(self._check(images[:1])))

    def _plain_key(self, count: int, device: torch.device) -> NoiseKey:
        begin, purpose, seed = (0, "frozen", self._frozen[-1]) if self._frozen else (self._position, "plain", self.seed)
        if not self._frozen:
            self._position += count
        ids = torch.arange(begin, begin + count, device=device)
        return self._key(ids, torch.zeros_like(ids), purpose, seed)

    def _key(self, ids: Tensor, draws: Tensor, purpose: str, seed: int) -> NoiseKey:
        return NoiseKey.for_images(seed, purpose, ids, draws, self.refinement.independent_chains)

    # Forward

    def forward(self, images: Any) -> Tensor:
        """(N, C, H, W) in [0, 1] -> logits (N, K), with the next noise of the plain stream."""
        x = self._check(images)
        return self._aggregated(self._chain_logits(x, self._plain_key(len(x), x.device)))

    def draw(self, images: Any, image_ids: Tensor, draw_ids: Tensor, purpose: str, seed: int) -> Tensor:
        """Logits (N, K) with keyed noise: image_ids, draw_ids int64 (N,); within frozen_noise that noise is used."""
        x = self._check(images)
        ids, draws = (torch.as_tensor(v, dtype=torch.int64, device=x.device) for v in (image_ids, draw_ids))
        if ids.shape != (len(x),) or draws.shape != (len(x),):
            shapes = tuple(ids.shape), tuple(draws.shape)
            raise ValueError(f"expected image_ids and draw_ids of shape ({len(x)},), got {shapes}: one each an image")
        if self._frozen:
            draws, purpose, seed = torch.zeros_like(draws), "frozen", self._frozen[-1]
        return self._aggregated(self._chain_logits(x, self._key(ids, draws, purpose, seed)))

    def _aggregated(self, logits: Tensor) -> Tensor:
        return energy_functions.aggregate_chains(logits, self.aggregate)

    def refine(self, images: Any) -> Tensor:
        """Chains' last states (N, chains, C, H, W) in [0, 1] units, clipped only where the refinement clamps."""
        x = self._check(images)
        key = self._plain_key(len(x), x.device)
        with self._computing():
            rows = torch.cat([state for state, _ in self._refined(x, key)] or [self._scaled(x)])
            low, high = self.input_range
            return ((rows - low) / (high - low)).reshape(len(x), self.refinement.independent_chains, *x.shape[1:])

    def log_px(self, images: Any) -> Tensor:
        """Unnormalised log p(x) of the images themselves, unrefined: (N, C, H, W) -> (N,)."""
        x = self._check(images)
        with self._computing():
            return self._log_density(self._scaled(x), None, 0)

    def log_pxy(self, images: Any, labels: Any) -> Tensor:
        """Unnormalised log p(x, y) = f(x)[y] of the images themselves, unrefined: (N,)."""
        x = self._check(images)
        y = check_labels(labels, len(x), self.num_classes).to(x.device)
        with self._computing():
            logits = self._logits(self._scaled(x), None, 0)
            y = check_labels(y.clone(), len(x), logits.shape[1])  # a clone here is no inference tensor
            return energy_functions.log_pxy(logits, y)

    def _check(self, images: Any) -> Tensor:
        return check_images(images, self.input_shape).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the network's parameters are; the CPU without any."""
        return next((p.device for p in self.network.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in: its parameters' type, float32 without any."""
        return next((p.dtype for p in self.network.parameters() if p.is_floating_point()), torch.float32)

    @contextmanager
    def _computing(self, attacked: bool = False) -> Iterator[None]:
        """Eval mode, frozen parameters, our own precision, and outside inference mode, where the score needs a graph.

        attacked: in a backward, where nothing records, compute as the forward did that recorded.
        """
        recording = torch.is_grad_enabled()
        with (
            torch.inference_mode(False),  # this alone would switch gradients on
            torch.set_grad_enabled(recording),
            torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16" and (recording or attacked)),
            quiet(self.network, self.energy),
        ):
            yield

    def _scaled(self, images: Tensor) -> Tensor:
        low, high = self.input_range
        layout = torch.contiguous_format if self.precision == "float32" else torch.channels_last
        return (low + (high - low) * images.to(self.dtype)).contiguous(memory_format=layout)

    def _refined(self, images: Tensor, key: NoiseKey) -> Iterator[tuple[Tensor, NoiseKey]]:
        """Micro-batches of refined rows in network units, each with its noise key."""
        rows = self._scaled(images).repeat_interleave(self.refinement.independent_chains, 0)
        size, kept, compact = self._plan(rows)
        for begin in range(0, len(rows), size):
            part = slice(begin, begin + size)
            chain = self._chain(key.rows(part), rows, kept, compact)
            yield refine_rows(rows[part], chain, self.gradient), key.rows(part)

    def _chain(self, key: NoiseKey, rows: Tensor, kept: int, compact: bool) -> Chain:
        return Chain(
            log_density=lambda x, t: self._log_density(x, key, t),
            noise=lambda t: key.normal(t, tuple(rows.shape[1:]), rows.dtype),
            refinement=self.refinement,
            bounds=self.input_range,
            quiet=lambda: self._computing(attacked=True),
            spent=self.spent,
            kept_steps=kept,
            lean=Lean(compact),
        )

    def _plan(self, rows: Tensor) -> tuple[int, int, bool]:
        """Rows per micro-batch, steps whose graphs are kept, and whether compactly.

        Both graphs in use and graphs kept stay within half the memory budget; compact ones save memory, not time.
        """
        steps = self.refinement.steps
        if len(rows) == 0 or steps == 0:
            return MICRO_BATCH, 0, False
        affordable = self.memory // (2 * self._graph_bytes(rows, False))
        size = max(1, min(MICRO_BATCH, affordable))
        if affordable >= steps * len(rows):
            return size, steps, False
        return size, min(steps, self.memory // (2 * self._graph_bytes(rows, True)) // len(rows)), True

    def affordable_rows(self, images: Any) -> int:
        """How many images (N, C, H, W) like these the memory budget allows to differentiate at once, unrefined."""
        with self._computing():
            return self.memory // self._graph_bytes(self._scaled(self._check(images[:1])), False)

    def _graph_bytes(self, rows: Tensor, compact: bool) -> int:
        like = (rows.shape[1:], rows.dtype, compact)
        if like not in self._row_bytes:
            probe = rows[:1].detach().repeat(2, 1, 1, 1)
            self._row_bytes[like] = graph_bytes(lambda x: self._log_density(x, None, 0), probe, compact)
        return self._row_bytes[like]

    def _chain_logits(self, images: Tensor, key: NoiseKey) -> Tensor:
        """Logits of every chain: (N, chains, K)."""
        with self._computing():
            keep = not (torch.is_grad_enabled() and images.requires_grad) or self._within_memory(images)
            parts = [self._classified(rows, part, keep) for rows, part in self._refined(images, key)]
            logits = torch.cat(parts) if parts else self._logits(self._scaled(images), None, 0)
            return logits.reshape(len(images), self.refinement.independent_chains, logits.shape[1])

    def _within_memory(self, images: Tensor) -> bool:
        """Whether graphs of the classification of all rows fit into half the budget."""
        rows = len(images) * self.refinement.independent_chains
        return rows <= MICRO_BATCH or rows * self._graph_bytes(self._scaled(images[:1]), False) <= self.memory // 2

    def _classified(self, rows: Tensor, key: NoiseKey, keep: bool) -> Tensor:
        """Logits of refined rows (R, C, H, W): (R, K). keep: their graph; else it is recomputed in the backward."""

        def logits(x: Tensor) -> Tensor:
            self.spent.forwards += len(x)
            with self._computing(attacked=True):
                return self._logits(x, key, self.refinement.steps + 1, count=False)

        if keep:
            return self._logits(rows, key, self.refinement.steps + 1)
        rows.register_hook(partial(self._count_backward, len(rows)))
        return checkpoint(logits, rows, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def _log_density(self, x: Tensor, key: NoiseKey | None, t: int) -> Tensor:
        if self.energy is None:
            return energy_functions.log_px(self._logits(x, key, t, count=False))
        value = self._call(self.energy, x, key, t)
        if _shape(value) not in ((len(x),), (len(x), 1)):
            raise ValueError(f"expected log p(x) of shape ({len(x)},) from the energy, got {_shape(value)}: check it")
        return value.reshape(len(x))  # type: ignore[no-any-return]

    def _logits(self, x: Tensor, key: NoiseKey | None, t: int, count: bool = True) -> Tensor:
        """The network on rows in its own units."""
        if count:
            self.spent.forwards += len(x)
            if x.requires_grad:
                x.register_hook(partial(self._count_backward, len(x)))
        logits, classes = self._call(self.network, x, key, t), self.num_classes
        shape = _shape(logits)
        if len(shape) != 2 or shape[0] != len(x) or shape[1] != (classes or shape[1]):
            raise ValueError(f"expected logits ({len(x)}, {classes or 'K'}) from the network, got {shape}: check it")
        return logits  # type: ignore[no-any-return]

    def _call(self, module: nn.Module, x: Tensor, key: NoiseKey | None, t: int) -> Any:
        out = self._calls(module, self._driven(), x, key, t)
        return out.to(x.dtype) if self.precision != "float32" and isinstance(out, Tensor) else out

    def _driven(self) -> list[nn.Module]:
        return [self.network] if self.energy is None else [self.network, self.energy]

    def _count_backward(self, rows: int, gradient: Tensor) -> None:
        self.spent.backwards += rows


def _check_type(name: str, value: Any, kinds: Any) -> None:
    if not isinstance(value, kinds):
        wanted = "Refinement" if name == "refinement" else "nn.Module"
        raise TypeError(f"expected {name} to be a {wanted}, got {type(value).__name__}: wrap or build one")


def _shape(out: Any) -> tuple[Any, ...]:
    return tuple(out.shape) if isinstance(out, Tensor) else (type(out).__name__,)
