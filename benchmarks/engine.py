"""The gradient of a JEM-k classifier: ours beside what one would write without us.

    python benchmarks/engine.py                       # both networks, k = 1, 10, 40; twenty minutes on two cores
    python benchmarks/engine.py --networks embedded --steps 10 --repeats 5

unrolled: autograd through all steps (create_graph). checkpoint: torch.utils.checkpoint around each step.
straight-through: the chain's Jacobian taken as the identity; not the same gradient, but the least work. ours: the exact
gradient with the default memory budget; half: with a budget that takes at most half of unrolled's memory; frugal: with
next to none, so that all but the states is recomputed or kept as bits; bf16: `precision="bf16"`, where the processor
computes in it. All are float32 and contiguous but bf16. First the gradients are compared (without noise); then seconds,
F and peak memory are measured.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import forward, interleaved, peak_bytes, print_growth, record, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jem_robust as jr
from jem_robust.gradients import graph_bytes
from jem_robust.networks import build_network
from jem_robust.precision import has_bf16

OURS = ("ours", "half", "frugal", "bf16") if has_bf16("cpu") else ("ours", "half", "frugal")
CONTESTANTS = ("unrolled", "checkpoint", "straight-through", *OURS)
EXACT = ("checkpoint", "ours", "half", "frugal")
NOISE = 0.01
TIGHT = 3 * 2**30  # bytes for k = 40


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A frozen network and one image in its range, (1, C, H, W)."""
    torch.manual_seed(0)
    if name == "embedded":
        found, shape = jr.load_model("jem-fashion-mnist").network, (1, 1, 28, 28)
    else:
        found, shape = build_network("wide-resnet", depth=16, width=2), (1, 3, 32, 32)
    return found.requires_grad_(False).eval(), torch.rand(shape)


def unrolled(net: nn.Module, x: Tensor, steps: int, noise: float, around: Callable[..., Any] | None = None) -> Tensor:
    """Gradient of the summed first logit of JEM-k at images x (N, C, H, W) in [0, 1], step size 1."""
    leaf = x.clone().requires_grad_()

    def step(state: Tensor) -> Tensor:
        gradient = torch.autograd.grad(net(state).logsumexp(1).sum(), state, create_graph=True)[0]
        return state + gradient + noise * torch.randn_like(state)

    state = 2 * leaf - 1
    for _ in range(steps):
        state = around(step, state, use_reentrant=False) if around else step(state)
    return torch.autograd.grad(net(state)[:, 0].sum(), leaf)[0]


def ours(net: nn.Module, x: Tensor, steps: int, noise: float, **settings: Any) -> Tensor:
    """The same by us."""
    model = jr.JEMClassifier(net, jr.Refinement(steps=steps, noise=noise, chains=1), **settings)
    ids = torch.arange(len(x))
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(model.draw(leaf, ids, ids * 0, "attack", 0)[:, 0].sum(), leaf)[0]


def contestant(
    name: str, net: nn.Module, image: Tensor, steps: int, batch: int, budget: int
) -> Callable[[Tensor, float], Tensor]:
    """Images and noise -> gradient."""
    if name in ("unrolled", "checkpoint"):
        return lambda x, noise: unrolled(net, x, steps, noise, checkpoint if name == "checkpoint" else None)
    settings: dict[str, Any] = {} if name in OURS else {"gradient": name}
    if name == "half":
        settings["memory"] = budget
    if name == "frugal":
        settings["memory"] = 2 * batch * graph_bytes(lambda z: net(z).logsumexp(1), image.repeat(2, 1, 1, 1))
    if name == "bf16":
        settings["precision"] = name
    return lambda x, noise: ours(net, x, steps, noise, **settings)


def compare(name: str, net: nn.Module, image: Tensor, steps: int) -> dict[str, float]:
    """Largest differences from the unrolled gradient, relative to its largest component, float64, no noise."""
    x = image.double().repeat(2, 1, 1, 1)
    net = net.double()
    plain = unrolled(net, x, steps, 0.0)
    found = {c: contestant(c, net, x[:1], steps, 2, 2**28)(x, 0.0) for c in EXACT}
    net.float()
    return {c: float((g - plain).abs().max() / plain.abs().max()) for c, g in found.items()}


def measure(name: str, steps: int, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of one network and number of steps."""
    net, image = network(name)
    differences = compare(name, net, image, min(steps, 10))
    if max(differences.values()) > 1e-9:
        raise RuntimeError(f"expected the same gradients, got relative differences {differences}")
    x = torch.rand(batch, *image.shape[1:])
    limit = TIGHT if steps == 40 else None
    memory = partial(peak_bytes, limit=limit)
    common = ["--networks", name, "--steps", str(steps), "--batch", str(batch), "--budget"]
    plain = memory([*common, "0", "--one", "unrolled"])
    budget = int((plain or TIGHT) * 0.8)  # of which half may be graphs, beside what every step needs
    peaks = {c: plain if c == "unrolled" else memory([*common, str(budget), "--one", c]) for c in CONTESTANTS}
    single = peak_bytes([*common[:3], "1", *common[4:], "0", "--one", "frugal"])
    runs = {
        c: partial(contestant(c, net, image, steps, batch, budget), x, NOISE)
        for c in CONTESTANTS
        if peaks[c] is not None
    }
    seconds = interleaved({"F": forward(net, 2 * x - 1), **runs}, repeats)
    reference = seconds.get("unrolled")
    return [
        {
            "network": name, "k": steps, "batch": batch, "contestant": c,
            "F": round(seconds[c] / seconds["F"], 1) if c in seconds else None,
            "time/unrolled": round(seconds[c] / reference, 3) if reference and c in seconds else None,
            "peak MB": round(peaks[c] / 2**20) if peaks[c] is not None else "out of memory",
            "peak/own k=1": round(peaks[c] / single, 2) if peaks[c] is not None and c in OURS else None,
            "difference": differences.get(c), "seconds": seconds.get(c),
        }
        for c in CONTESTANTS
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="embedded,wrn-16-2", help="comma-separated, of %(default)s")
    parser.add_argument("--steps", default="1,10,40", help="comma-separated numbers of SGLD steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        net, image = network(given.networks)
        x = torch.rand(given.batch, *image.shape[1:])
        run = contestant(given.one, net, image, int(given.steps), given.batch, given.budget)
        forward(net, x[:1])()
        print_growth(lambda: run(x, NOISE))
        return
    rows = []
    for name in given.networks.split(","):
        for steps in given.steps.split(","):
            rows += (new := measure(name, int(steps), given.batch, given.repeats))
            table(new)
    record("engine", rows)


if __name__ == "__main__":
    main()
