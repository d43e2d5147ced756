"""What `jem-robust attack` prints."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from jem_robust.evaluation.curve import RobustnessCurve


TABLE_WIDTH = 90


def eps_text(eps: float, norm: str) -> str:
    """8/255 for linf where it is a whole number of grey levels, the number itself otherwise."""
    levels = 255 * eps
    return f"{round(levels)}/255" if norm == "linf" and eps > 0 and abs(levels - round(levels)) < 1e-6 else f"{eps:.4g}"


def print_curve(curve: "RobustnessCurve", paths: Sequence[Path]) -> None:
    """The table, what it rests on, warnings and the paths written."""
    from jem_robust.evaluation.curve import THREAT_MODEL

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)  # a narrower table would lose columns, not only room
    table = Table(title=_title(curve), title_justify="left", title_style="bold")
    table.add_column(f"eps ({curve.norm})", justify="right")
    for column in ("accuracy", "95 % interval", "majority"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("images broken by", overflow="fold")
    for i, eps in enumerate(curve.epsilons):
        attacks = curve.per_attack[i]["attacks"] if eps > 0 else []
        broke = ", ".join(f"{attack['name']} {attack['broke']}" for attack in attacks)
        table.add_row(
            eps_text(eps, curve.norm), f"{curve.accuracy[i]:.1%}", f"{100 * curve.low[i]:.1f}-{curve.high[i]:.1%}",
            f"{curve.majority[i]:.1%}", broke,
        )  # fmt: skip
    console.print(table)
    draws = "1 (deterministic model)" if curve.draws == 1 else f"{curve.draws} judge, {curve.select_draws} select"
    console.print(f"clean accuracy {curve.clean:.1%}   n {curve.n}   draws {draws}   seed {curve.seed}")
    console.print(f"threat model: {THREAT_MODEL}")
    attacks = curve.about.get("attacks", [])
    if attacks and all("max_queries" in attack for attack in attacks):
        console.print("note: attacked by queries only (black box); attacks that use gradients may break more")
    spent = curve.about["spent"]
    console.print(
        f"spent: {spent['forwards']:,} forwards, {spent['backwards']:,} backwards, {curve.about['seconds']:.0f} s"
    )
    for text in curve.warnings:
        console.print(f"warning: {text}", style="yellow", markup=False)
    for path in paths:
        console.print(str(path), markup=False)


def _title(curve: "RobustnessCurve") -> str:
    model, refinement = curve.about["model"], curve.about["refinement"]
    chains = f", {refinement['chains']} chains" if refinement["steps"] else ""
    return f"{model.get('name', 'model')}, k = {refinement['steps']} SGLD steps{chains}"


def print_estimate(model: Any, images: Any, labels: Any, arguments: dict[str, Any]) -> None:
    """Expected forwards, time and memory."""
    from jem_robust.evaluation.estimate import TRIAL_IMAGES, estimate

    expected = estimate(model, images, labels, probe_images=TRIAL_IMAGES, **arguments)
    minutes = expected.seconds / 60
    time_text = (
        f"{expected.seconds:.0f} s"
        if minutes < 3
        else f"{minutes:.0f} min"
        if minutes < 180
        else f"{minutes / 60:.1f} h"
    )
    print(
        f"expected: {expected.rows:,.0f} forwards and backwards, {time_text}, {expected.memory / 2**30:.2f} GB at most"
    )
    print(
        f"for {len(images)} images and {len(arguments['epsilons'])} epsilons; tried on {expected.probed} of the images"
    )
