"""`jem-robust plot`: several results in one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from jem_robust.evaluation.curve import RobustnessCurve

EXAMPLE = """
\b
Example:
  jem-robust plot runs/jem0/ runs/jem10/ -o curve.png
"""


@click.command("plot", epilog=EXAMPLE)
@click.argument("results", nargs=-1, required=True, metavar="DIR...", type=click.Path(file_okay=False))
@click.option("-o", "--out", default="curve.png", show_default=True, metavar="FILE", help="Figure: .png, .pdf or .svg.")
@click.option("--title", help="Title of the figure.")
def command(results: tuple[str, ...], out: str, title: str | None) -> int:
    """Draw robust accuracy of several result folders, with 95 % intervals, one panel a norm."""
    from jem_robust.evaluation.curve import RobustnessCurve
    from jem_robust.reporting.plots import plot_curves

    curves = [RobustnessCurve.load(Path(r)) for r in results]
    click.echo(plot_curves(curves, out, title))
    for line in differences(curves):
        click.echo(line)
    return 0


def differences(curves: Sequence["RobustnessCurve"]) -> list[str]:
    """For two results of one norm on the same images: their paired difference at every eps both have."""
    from jem_robust.commands.report import eps_text
    from jem_robust.evaluation.verdict import paired_difference

    if len(curves) != 2 or curves[0].norm != curves[1].norm or curves[0].labels.tolist() != curves[1].labels.tolist():
        return []
    a, b = curves
    lines = [f"first minus second result, paired over {a.n} images:"]
    for i, eps in enumerate(a.epsilons):
        for j in (b.epsilons == eps).nonzero()[0]:
            mean, low, high = paired_difference(a.p_correct[i], b.p_correct[j], a.seed)
            lines.append(f"  eps {eps_text(eps, a.norm)}: {mean:+.1%} (95 %: {low:+.1%} to {high:+.1%})")
    return lines
