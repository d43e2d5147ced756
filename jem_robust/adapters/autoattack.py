"""AutoAttack (Croce & Hein 2020) in its version for random models: APGD-CE and APGD-DLR, 20 draws a gradient.

It comes from `autoattack` (the authors' repository), `pyautoattack` 0.2.0 or torchattacks 3.5.1's copy, whichever is
installed, in this order.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from jem_robust.adapters.guard import missing

ITERATIONS = 100
EOT = 20
NORMS = {"linf": "Linf", "l2": "L2"}
BACKENDS = ("autoattack", "pyautoattack", "torchattacks")


def auto_attack(
    model: Any, images: Any, labels: Any, eps: Any, norm: str = "linf", seed: int = 0, *, iterations: int = ITERATIONS,
    eot: int = EOT, backend: str | None = None, progress: Callable[[int], None] | None = None,
) -> Any:  # fmt: skip
    """Attack images (N, C, H, W) of true labels (N,) within eps by AutoAttack `rand`: an AttackResult of our verdict.

    iterations: gradient steps of each of the two attacks; eot: draws a gradient; both are AutoAttack's by default and
    make (2 * iterations * eot) draws an image. backend: one of BACKENDS. Global random numbers, sys.settrace and
    AutoAttack's counters are the same afterwards. Raises ImportError without a backend, ValueError as PGD does.
    """
    from jem_robust.adapters.toolkit_attacks import ToolkitAttack

    arguments = {"iterations": iterations, "eot_iter": eot, "backend": backend}
    return ToolkitAttack("autoattack", "rand", norm, arguments)(model, images, labels, eps, seed, progress=progress)


def find_backend(backend: str | None = None) -> str:
    """The name of an installed backend: the one asked for or the first of BACKENDS."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"expected backend out of {BACKENDS}, got {backend!r}")
    failure = ImportError("none tried")
    for name in [backend] if backend else BACKENDS:
        try:
            import_module(name)
        except ImportError as error:
            failure = error
        else:
            return name
    remedy = "pip install pyautoattack, or pip install jem-robust[torchattacks]"
    raise missing(backend or "one of " + ", ".join(BACKENDS), remedy, failure) from failure


def perturb(
    module: nn.Module, images: Tensor, labels: Tensor, eps: float, norm: str, seed: int, iterations: int = ITERATIONS,
    eot_iter: int = EOT, backend: str | None = None, classes: int = 10,
) -> Tensor:  # fmt: skip
    """Images (N, C, H, W) as AutoAttack leaves them. Call it within isolation.isolated: it reseeds global numbers.

    Fewer than 3 classes have no DLR loss: APGD-CE runs alone.
    """
    name = find_backend(backend)
    losses = ["ce", "dlr"] if classes > 2 else ["ce"]
    if name == "torchattacks":
        return _torchattacks(module, images, labels, eps, norm, seed, iterations, eot_iter, losses)
    package = import_module(name)
    extra: dict[str, Any] = {"verbose": False} if name == "autoattack" else {}
    attack = package.AutoAttack(
        module, norm=NORMS[norm], eps=eps, seed=seed, version="rand", device=images.device, **extra
    )
    attack.verbose = False
    attack.attacks_to_run = [f"apgd-{loss}" for loss in losses]
    apgd = attack.apgd
    apgd.eot_iter, apgd.n_iter = eot_iter, iterations
    # Both derive these from n_iter at construction only.
    apgd.n_iter_2, apgd.n_iter_min, apgd.size_decr = (max(int(share * iterations), 1) for share in (0.22, 0.06, 0.03))
    checks = import_module(f"{name}.checks")
    before = dict(checks.funcs)
    if name == "autoattack":
        attack.logger.log = lambda text: None  # prints what it found out about random and dynamic models: we know
    try:
        result: Any = attack.run_standard_evaluation(images, labels)
    finally:
        checks.funcs.update(before)  # counts what looks like a dynamic defence and is never reset
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _torchattacks(
    module: nn.Module, images: Tensor, labels: Tensor, eps: float, norm: str, seed: int, iterations: int, eot: int,
    losses: list[str],
) -> Tensor:  # fmt: skip
    """torchattacks' AutoAttack fixes 10 steps where the original takes 100, so its APGD is run as the original does."""
    import torchattacks

    result = images.clone()
    left = torch.arange(len(images), device=images.device)
    for loss in losses:
        with torch.no_grad():
            left = left[module(result[left]).argmax(1) == labels[left]] if len(left) else left
        if len(left) == 0:
            break
        apgd = torchattacks.APGD(
            module, norm=NORMS[norm], eps=eps, steps=iterations, seed=seed, loss=loss, eot_iter=eot, n_restarts=1
        )
        result[left] = apgd(images[left], labels[left])
    return result
