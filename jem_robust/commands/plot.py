"""`jem-robust plot`: several results in one figure."""

from pathlib import Path

import click

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

    click.echo(plot_curves([RobustnessCurve.load(Path(r)) for r in results], out, title))
    return 0
