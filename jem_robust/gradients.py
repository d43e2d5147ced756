"""How an attack differentiates the refinement: the gradient estimators of a chain, and the one autograd.Function each.

exact: reverse mode v <- v + a * H(x_t) v through every step with H the Hessian of log p (autograd's almost-everywhere
derivative: on LeakyReLU networks it does not see the curvature at kinks). Only the states are stored; graphs are kept
for as many steps as the memory budget allows and recomputed for the rest, with the forward's own noise.
straight-through: the chain's Jacobian taken as the identity (BPDA, Athalye, Carlini & Wagner 2018), which is what the
2019 JEM attack script computes by adding to `x_k.data`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jem_robust.langevin import Noise, Refinement, clip_score, refine, score, score_graph, start, step, step_noise
from jem_robust.lean import Lean

GRADIENTS = ("exact", "straight-through")


@dataclass
class Spent:
    """Work done by a network, in rows (images x chains x draws): forwards, and input backwards (about 1F each)."""

    forwards: int = 0
    backwards: int = 0

    def since(self, earlier: "Spent") -> "Spent":
        """Work done after `earlier` was copied."""
        return Spent(self.forwards - earlier.forwards, self.backwards - earlier.backwards)


@dataclass(frozen=True)
class Chain:
    """One batch of chains in network units.

    log_density(x, t): states (R, C, H, W) of step t -> (R,). noise(t): standard normal noise of step t. quiet: context
    in which the network computes (eval mode, frozen parameters). kept_steps: last steps whose graphs stay in memory.
    """

    log_density: Callable[[Tensor, int], Tensor]
    noise: Noise
    refinement: Refinement
    bounds: tuple[float, float]
    quiet: Callable[[], AbstractContextManager[None]]
    spent: Spent
    kept_steps: int = 0
    lean: Lean = field(default_factory=Lean)

    def score(self, x: Tensor, t: int) -> Tensor:
        """grad log p at the state before step t, without a graph."""
        self.spent.forwards += len(x)
        self.spent.backwards += len(x)
        return score(lambda state: self.log_density(state, t), x)

    def score_graph(self, x: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """A leaf with the state and grad log p at it, with the graph between them."""
        self.spent.forwards += len(x)
        self.spent.backwards += len(x)
        with self.lean:
            return score_graph(lambda state: self.log_density(state, t), x)


def refine_rows(x: Tensor, chain: Chain, estimator: str) -> Tensor:
    """Run chains on states (R, C, H, W); gradients flow back to x by the estimator where autograd records."""
    if chain.refinement.steps == 0:
        return start(x, chain.noise, chain.refinement)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return refine(x.detach(), chain.score, chain.noise, chain.refinement, chain.bounds)
    function = _ExactChain if estimator == "exact" else _StraightThroughChain
    return function.apply(x, chain)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThroughChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: Chain) -> Tensor:
        return refine(x, chain.score, chain.noise, chain.refinement, chain.bounds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ExactChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: Chain) -> Tensor:
        settings = chain.refinement
        x = start(x, chain.noise, settings)
        ctx.chain, ctx.states, ctx.inside, ctx.kept = chain, [], [], {}
        for t in range(1, settings.steps + 1):
            ctx.states.append(x)
            if t > settings.steps - chain.kept_steps:
                ctx.kept[t] = chain.score_graph(x, t)
                gradient = ctx.kept[t][1].detach()
            else:
                gradient = chain.score(x, t)
            moved = step(x, gradient, step_noise(chain.noise, t, settings), settings)
            x = moved.clamp(*chain.bounds) if settings.clamp else moved
            ctx.inside.append(moved == x if settings.clamp else None)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None]:
        chain: Chain = ctx.chain
        settings = chain.refinement
        with chain.quiet():
            for t in range(settings.steps, 0, -1):
                if settings.clamp:
                    v = v * ctx.inside[t - 1]
                # A second backward finds its kept graph used up and recomputes.
                leaf, gradient = ctx.kept.pop(t, None) or chain.score_graph(ctx.states[t - 1], t)
                v = v + settings.step_size * _hessian_product(leaf, gradient, v, settings)
                chain.spent.backwards += 2 * len(v)
        return v, None


def _hessian_product(leaf: Tensor, gradient: Tensor, v: Tensor, settings: Refinement) -> Tensor:
    """H v, with the rows of H at components that gradient_clamp clips set to zero."""
    if not gradient.requires_grad:  # log p is linear in x
        return torch.zeros_like(v)
    with torch.enable_grad():
        value = (clip_score(gradient, settings) * v).sum()  # with `v` apart autograd would import sympy, half a second
    product = torch.autograd.grad(value, leaf, allow_unused=True)[0]
    return torch.zeros_like(v) if product is None else product


@contextmanager
def quiet(*modules: nn.Module | None) -> Iterator[None]:
    """Modules in eval mode with frozen parameters; every flag is as before afterwards.

    Tensors of a module built under inference_mode cannot be in a graph: normal copies stand in for them meanwhile.
    """
    present = [module for module in modules if module is not None]
    stores: list[dict[str, Any]] = [
        s for module in present for m in module.modules() for s in (m._parameters, m._buffers)
    ]
    inference = [(s, name, t) for s in stores for name, t in s.items() if t is not None and t.is_inference()]
    for store, name, tensor in inference:
        store[name] = nn.Parameter(tensor.clone(), False) if isinstance(tensor, nn.Parameter) else tensor.clone()
    training = [m for module in present for m in module.modules() if m.training]
    learning = [p for module in present for p in module.parameters() if p.requires_grad]
    try:
        for m in training:
            m.training = False
        for p in learning:
            p.requires_grad_(False)
        yield
    finally:
        for store, name, tensor in inference:
            store[name] = tensor
        for m in training:
            m.training = True
        for p in learning:
            p.requires_grad_(True)


def graph_bytes(log_density: Callable[[Tensor], Tensor], x: Tensor, compact: bool = False) -> int:
    """Bytes autograd stores for one more row of grad log p with create_graph: the cost of keeping one step's graph.

    x: at least two rows: the difference of two and one leaves out what does not grow. compact: of `Lean`.
    """

    def stored(rows: Tensor) -> int:
        seen: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            # A slice of an arena's chunk takes its own bytes only, an expanded tensor those of its storage.
            seen[tensor.data_ptr()] = min(storage.nbytes(), tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), Lean(compact):
            kept = score_graph(log_density, rows.clone())  # a storage of just these rows
        del kept  # only now: the storages of a living graph have different addresses
        return sum(seen.values())

    return max(stored(x[:2]) - stored(x[:1]), x[0].numel() * x.element_size())
