"""The JEM-k classifier: images in [0, 1] -> chains -> refinement -> mean logits. Random, and differentiable in images."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self
from warnings import warn

import torch
from torch import Tensor, nn

from jem_robust import energy as energy_functions
from jem_robust.gradients import GRADIENTS, Chain, Spent, graph_bytes, quiet, refine_rows
from jem_robust.images import check_images, check_labels
from jem_robust.langevin import Refinement
from jem_robust.randomness import NoiseKey, global_rng

AGGREGATES = ("logits", "probabilities", "vote")
MEMORY = 2**30
MICRO_BATCH = 64


class JEMClassifier(nn.Module):
    """A network behind its SGLD refinement (Grathwohl et al. 2020), for measuring and attacking, not for training.

    network: images (N, C, H, W) in `input_range` -> logits (N, K). refinement: settings of the chain.
    energy: module with log p(x), (N,), that drives the refinement instead of logsumexp of the network's logits.
    aggregate: "logits" (mean over chains), "probabilities" (log of the mean softmax) or "vote" (log of vote shares).
    gradient: "exact" or "straight-through". seed: of the plain noise stream. input_shape (C, H, W), num_classes: checked
    where given. memory: bytes that graphs of one call may take. Raises ValueError on settings that make no sense.
    """

    bounds = (0.0, 1.0)

    def __init__(
        self, network: nn.Module, refinement: Refinement | None = None, input_range: tuple[float, float] = (-1.0, 1.0),
        energy: nn.Module | None = None, aggregate: str = "logits", gradient: str = "exact", seed: int = 0, *,
        input_shape: tuple[int, ...] | None = None, num_classes: int | None = None, memory: int = MEMORY,
        card: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        low, high = (float(v) for v in input_range)
        if not low < high:
            raise ValueError(f"expected an input range (low, high) with low < high, got {input_range}")
        if aggregate not in AGGREGATES:
            raise ValueError(f"expected aggregate out of {AGGREGATES}, got {aggregate!r}")
        if gradient not in GRADIENTS:
            raise ValueError(f"expected gradient out of {GRADIENTS}, got {gradient!r}; transfer is an attack's name")
        if not isinstance(network, nn.Module):
            raise TypeError(f"expected an nn.Module as network, got {type(network).__name__}: wrap it in a module")
        self.network, self.energy = network, energy
        self.refinement = refinement or Refinement()
        self.input_range = (low, high)
        self.aggregate, self.gradient, self.seed, self.memory = aggregate, gradient, seed, memory
        self.input_shape = None if input_shape is None else tuple(input_shape)
        self.num_classes, self.card = num_classes, card or {}
        self.spent = Spent()
        self._position = 0
        self._frozen: list[int] = []
        self._global_noise: bool | None = None  # whether the network draws from torch's global RNG; unknown at first
        self._row_bytes = 0

    def extra_repr(self) -> str:
        """Settings for the module's printout."""
        return f"{self.refinement}, input_range={self.input_range}, aggregate={self.aggregate}, gradient={self.gradient}"

    # Views

    def _view(self, refinement: Refinement, gradient: str) -> "JEMClassifier":
        view = JEMClassifier(
            self.network, refinement, self.input_range, self.energy, self.aggregate, gradient, self.seed,
            input_shape=self.input_shape, num_classes=self.num_classes, memory=self.memory, card=self.card,
        )  # fmt: skip
        view.training, view.spent, view._global_noise = self.training, self.spent, self._global_noise
        return view

    def with_refinement(self, **changes: Any) -> "JEMClassifier":
        """Another view of the same network; keywords of Refinement. steps=0 also drops start noise and extra chains."""
        return self._view(self.refinement.updated(**changes), self.gradient)

    def with_gradient(self, gradient: str) -> "JEMClassifier":
        """Another view of the same network with another gradient estimator."""
        return self._view(self.refinement, gradient)

    # Noise

    def reseed(self, seed: int) -> Self:
        """Restart the plain noise stream."""
        self.seed, self._position = seed, 0
        return self

    @contextmanager
    def frozen_noise(self, seed: int = 0) -> Iterator[Self]:
        """Within the block row i always gets noise (seed, i): a deterministic function. May be nested."""
        self._frozen.append(seed)
        try:
            yield self
        finally:
            self._frozen.pop()

    @property
    def deterministic(self) -> bool:
        """Whether two calls on one image agree. A network with randomness of its own is known after its first call."""
        return bool(self._frozen) or not (self.refinement.random or self._global_noise)

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
        return self._aggregate(self._chain_logits(x, self._plain_key(len(x), x.device)))

    def draw(self, images: Any, image_ids: Tensor, draw_ids: Tensor, purpose: str, seed: int) -> Tensor:
        """Logits (N, K) with keyed noise: image_ids, draw_ids int64 (N,); within frozen_noise that noise is used."""
        x = self._check(images)
        ids, draws = (torch.as_tensor(v, dtype=torch.int64, device=x.device) for v in (image_ids, draw_ids))
        if self._frozen:
            draws, purpose, seed = torch.zeros_like(draws), "frozen", self._frozen[-1]
        return self._aggregate(self._chain_logits(x, self._key(ids, draws, purpose, seed)))

    def refine(self, images: Any) -> Tensor:
        """Chains' last states (N, chains, C, H, W) in [0, 1] units, clipped only where the refinement clamps."""
        x = self._check(images)
        key = self._plain_key(len(x), x.device)
        with self._computing():
            rows = torch.cat([state for state, _ in self._refined(x, key)] or [self._scaled(x)])
            low, high = self.input_range
            return ((rows - low) / (high - low)).unflatten(0, (len(x), self.refinement.independent_chains))

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
            return energy_functions.log_pxy(self._logits(self._scaled(x), None, 0), y)

    def _check(self, images: Any) -> Tensor:
        x = check_images(images, self.input_shape)
        return (x.clone() if x.is_inference() else x).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the network's parameters are; the CPU without any."""
        return next((p.device for p in self.network.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in: its parameters' type, float32 without any."""
        return next((p.dtype for p in self.network.parameters() if p.is_floating_point()), torch.float32)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Eval mode, frozen parameters, no autocast, and outside inference mode, where the score needs a graph."""
        inference = torch.is_inference_mode_enabled()
        with (
            torch.inference_mode(False),
            torch.no_grad() if inference else nullcontext(),
            torch.autocast(self.device.type, enabled=False),
            quiet(self.network, self.energy),
        ):
            yield

    def _scaled(self, images: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled() is False and images.is_inference():
            images = images.clone()
        low, high = self.input_range
        return low + (high - low) * images.to(self.dtype)

    def _refined(self, images: Tensor, key: NoiseKey) -> Iterator[tuple[Tensor, NoiseKey]]:
        """Micro-batches of refined rows in network units, each with its noise key."""
        rows = self._scaled(images).repeat_interleave(self.refinement.independent_chains, 0)
        size, kept = self._plan(rows)
        for begin in range(0, len(rows), size):
            part = slice(begin, begin + size)
            yield refine_rows(rows[part], self._chain(key.rows(part), rows, kept), self.gradient), key.rows(part)

    def _chain(self, key: NoiseKey, rows: Tensor, kept: int) -> Chain:
        return Chain(
            log_density=lambda x, t: self._log_density(x, key, t),
            noise=lambda t: key.normal(t, tuple(rows.shape[1:]), rows.dtype),
            refinement=self.refinement,
            bounds=self.input_range,
            quiet=partial(quiet, self.network, self.energy),
            spent=self.spent,
            kept_steps=kept,
        )

    def _plan(self, rows: Tensor) -> tuple[int, int]:
        """Rows per micro-batch and steps whose graphs are kept, so that both stay within half the memory budget."""
        if len(rows) == 0 or self.refinement.steps == 0:
            return MICRO_BATCH, 0
        if not self._row_bytes:
            probe = rows[:1].detach().repeat(2, 1, 1, 1)
            self._row_bytes = graph_bytes(lambda x: self._log_density(x, None, 0), probe)
        micro_batch = max(1, min(MICRO_BATCH, self.memory // (2 * self._row_bytes)))
        return micro_batch, min(self.refinement.steps, self.memory // (2 * self._row_bytes * len(rows)))

    def _chain_logits(self, images: Tensor, key: NoiseKey) -> Tensor:
        """Logits of every chain: (N, chains, K)."""
        with self._computing():
            steps = self.refinement.steps
            parts = [self._logits(rows, part, steps + 1) for rows, part in self._refined(images, key)]
            logits = torch.cat(parts) if parts else self._logits(self._scaled(images), None, 0)
            return logits.unflatten(0, (len(images), self.refinement.independent_chains))

    def _log_density(self, x: Tensor, key: NoiseKey | None, t: int) -> Tensor:
        if self.energy is None:
            return energy_functions.log_px(self._logits(x, key, t, count=False))
        value: Tensor = self.energy(x)
        if value.shape not in ((len(x),), (len(x), 1)):
            raise ValueError(f"expected log p(x) of shape ({len(x)},) from the energy, got {tuple(value.shape)}")
        return value.reshape(len(x))

    def _logits(self, x: Tensor, key: NoiseKey | None, t: int, count: bool = True) -> Tensor:
        """The network on rows in its own units. A network that draws from the global RNG gets a seed of ours."""
        if count:
            self.spent.forwards += len(x)
            if x.requires_grad:
                x.register_hook(partial(self._count_backward, len(x)))
        if self._global_noise is None and len(x):
            self._global_noise = self._draws_globally(x[:1].detach())
        with global_rng(key.global_seed(t) if key else 0, x.device) if self._global_noise else nullcontext():
            logits = self.network(x)
        classes = self.num_classes
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if len(shape) != 2 or shape[0] != len(x) or (classes and shape[1] != classes):
            raise ValueError(f"expected logits ({len(x)}, {classes or 'K'}) from the network, got {shape}: check it")
        return logits  # type: ignore[no-any-return]

    def _draws_globally(self, x: Tensor) -> bool:
        before = torch.get_rng_state()
        with global_rng(None, x.device):
            self.network(x)
            drew = not torch.equal(before, torch.get_rng_state())
        if drew:
            warn(
                "the network draws from torch's global random numbers: it gets seeded ones instead, and its results "
                "may depend on the batch size; switch its own randomness off if you can",
                stacklevel=2,
            )
        return drew

    def _count_backward(self, rows: int, gradient: Tensor) -> None:
        self.spent.backwards += rows

    def _aggregate(self, logits: Tensor) -> Tensor:
        """(N, chains, K) -> (N, K). NaN in any chain stays NaN."""
        mean = logits.mean(1)
        if self.aggregate == "logits":
            return mean
        if self.aggregate == "probabilities":
            return logits.log_softmax(2).logsumexp(1) - torch.tensor(logits.shape[1], dtype=logits.dtype).log()
        votes = nn.functional.one_hot(logits.argmax(2), logits.shape[2]).to(logits.dtype).mean(1)
        # log 0 would read as a broken network; the smallest normal number is as good as no vote.
        shares = votes.clamp_min(torch.finfo(logits.dtype).tiny).log()
        shares = torch.where(torch.isfinite(logits).all(2).all(1, keepdim=True), shares, torch.nan)
        return mean + (shares - mean).detach() if mean.requires_grad else shares
