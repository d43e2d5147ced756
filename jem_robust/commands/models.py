"""`jem-robust models`: what is embedded, with its card."""

from typing import Any

import click

EXAMPLE = """
\b
Example:
  jem-robust models --card
"""


@click.command("models", epilog=EXAMPLE)
@click.option("--card", is_flag=True, help="Print the whole cards as YAML.")
def command(card: bool) -> int:
    """List the embedded models: what they are, how they were made, and how accurate they are."""
    from jem_robust.checkpoints import file_hash, read_card
    from jem_robust.models import EMBEDDED

    for name, path in EMBEDDED.items():
        about = {"file": str(path), "sha256": file_hash(path), **read_card(path)}
        click.echo(_whole(about) if card else _short(name, about))
    return 0


def _whole(about: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(about, sort_keys=False, allow_unicode=True, width=110)
    return text


def _short(name: str, about: dict[str, Any]) -> str:
    lines = [click.style(name, bold=True), f"  {about.get('description', '')}"]
    lines += [f"  {key}: {about[key]}" for key in ("data", "licence", "command") if key in about]
    refinement = about.get("refinement", {})
    lines.append("  refinement: " + ", ".join(f"{k} {v}" for k, v in refinement.items()))
    lines.append("  metrics: " + ", ".join(f"{k} {_figure(v)}" for k, v in about.get("metrics", {}).items()))
    return "\n".join(lines)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
