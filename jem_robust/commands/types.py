"""Option types and the --config option that subcommands share."""

from pathlib import Path
from typing import Any

import click

UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


class Norm(click.ParamType[str]):
    """linf or l2, in any of their usual spellings."""

    name = "norm"

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Canonical name; a usage error otherwise."""
        from jem_robust_attacks.norms import parse_norm

        try:
            return parse_norm(value, self.allowed)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Epsilons(click.ParamType[tuple[float, ...]]):
    """A comma-separated list of perturbation sizes such as 2/255,8/255; a YAML list too."""

    name = "eps,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The sizes as floats; a usage error for anything else."""
        from jem_robust_attacks.norms import parse_epsilon

        parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
        try:
            return tuple(parse_epsilon(part) for part in parts)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Memory(click.ParamType[int]):
    """Bytes with an optional unit: 512MB, 1.5GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes; a usage error for anything else."""
        text = str(value).strip().upper().replace(" ", "")
        number = text.rstrip("KMGB")
        try:
            size = int(float(number) * UNITS[text[len(number) :]])
        except (KeyError, ValueError, OverflowError):
            size = 0
        if size < 1:
            self.fail(f"expected a size such as 512MB or 1GB, got {value!r}", param, ctx)
        return size


class EOT(click.ParamType[int | str]):
    """A number of draws, or auto."""

    name = "n|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """A positive int or "auto"; a usage error otherwise."""
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = 0
        if number < 1:
            self.fail(f"expected auto or a whole number from 1 up, got {value!r}", param, ctx)
        return number


def read_config(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Take defaults from a YAML file with the options' names as keys, or from a result.json (repeats that run)."""
    if value is None:
        return None
    import yaml

    try:
        loaded = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.BadParameter(f"expected a YAML file or a result.json, got {value} ({error})", ctx, param) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("command"), dict):
        loaded = loaded["command"].get("options")
    if not isinstance(loaded, dict):
        raise click.BadParameter(f"expected keys and values in {value}, got {type(loaded).__name__}", ctx, param)
    names = {p.name for p in ctx.command.params}
    options = {str(key).replace("-", "_"): v for key, v in loaded.items()}
    unknown = sorted(set(options) - names)
    if unknown:
        raise click.BadParameter(
            f"expected options of {ctx.info_name} in {value}, got {', '.join(unknown)}", ctx, param
        )
    ctx.default_map = {**(ctx.default_map or {}), **{k: v for k, v in options.items() if v is not None}}
    return value


config_option = click.option(
    "--config", metavar="FILE", is_eager=True, expose_value=False, callback=read_config,
    help="YAML with these options as keys, or a result.json, whose run is repeated. Options given here win.",
)  # fmt: skip
