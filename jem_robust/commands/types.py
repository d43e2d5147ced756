"""Option types and the --config option that subcommands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

RESULT_FOLDER = "jem_robust.result_folder"  # where a result.json given as --config lies
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


class AttackCommand(click.Command):
    """Lets every --attack-arg belong to the --attack before it: key=value becomes POSITION:key=value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Number the arguments by the attack they follow, then parse as ever."""
        numbered, attack, expected = [], -1, ""
        for word in args:
            option, equals, value = (expected, "=", word) if expected else word.partition("=")
            expected = option if not equals and option in ("--attack", "--attack-arg") else ""
            if equals and option == "--attack":
                attack += 1
            if equals and option == "--attack-arg":
                if attack < 0:
                    raise click.UsageError("expected --attack-arg after the --attack it belongs to", ctx)
                value = f"{attack}:{value}"
            if not expected:
                numbered.append(f"{option}={value}" if equals and option in ("--attack", "--attack-arg") else word)
        return super().parse_args(ctx, numbered + [expected] * bool(expected))


def attack_arguments(texts: Sequence[str], attacks: Sequence[str]) -> list[dict[str, Any]]:
    """One dictionary an attack from POSITION:key=value texts, numbers and booleans read as such."""
    import yaml

    found: list[dict[str, Any]] = [{} for _ in attacks]
    for text in texts:
        position, _, rest = text.partition(":")
        key, equals, value = rest.partition("=")
        if not (position.isdecimal() and int(position) < len(attacks) and key and equals):
            raise click.UsageError(f"expected --attack-arg key=value after an --attack, got {rest or text!r}")
        name, own = key.strip().replace("-", "_"), found[int(position)]
        if name in own:
            raise click.UsageError(f"expected {name} once for {attacks[int(position)]}, got it twice: leave one out")
        own[name] = yaml.safe_load(value)
    return found


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
        ctx.meta[RESULT_FOLDER] = Path(value).parent
    loaded = {} if loaded is None else loaded
    if not isinstance(loaded, dict):
        raise click.BadParameter(f"expected keys and values in {value}, got {type(loaded).__name__}", ctx, param)
    known = {p.name: p for p in ctx.command.params if p.expose_value and isinstance(p, click.Option)}
    options = {str(key).replace("-", "_"): v for key, v in loaded.items()}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise click.BadParameter(
            f"expected options of {ctx.info_name} in {value}, got {', '.join(unknown)}", ctx, param
        )
    try:
        options.update(_split_attacks(options))
    except ValueError as error:
        raise click.BadParameter(f"{error}, as in attack: [NAME: {{KEY: VALUE}}, NAME]", ctx, param) from error
    given = {k: _as_typed(known[k], v, ctx, param) for k, v in options.items() if v is not None}
    ctx.default_map = {**(ctx.default_map or {}), **given}
    return value


def _as_typed(option: click.Option, value: Any, ctx: click.Context, param: click.Parameter) -> Any:
    """A YAML value as it would be typed: text, which the option's own type then reads; lists where they may stand."""
    several = option.multiple or isinstance(option.type, Epsilons)
    if isinstance(value, dict) or (isinstance(value, list) and not several):
        raise click.BadParameter(f"expected one value for {option.name}, got {value!r}", ctx, param)
    if isinstance(value, list):
        return [str(v) for v in value]
    if option.multiple:
        return [str(value)]
    return value if isinstance(value, bool) and option.is_flag else str(value)


def _split_attacks(options: dict[str, Any]) -> dict[str, Any]:
    """Attacks of YAML, each a name or {name: {argument: value}}, as --attack and --attack-arg take them.

    Arguments under a key of their own are one attack's, or a result.json's, which has them numbered.
    """
    attacks, own = (
        [] if value is None else value if isinstance(value, list) else [value]
        for value in (options.get("attack"), options.get("attack_arg"))
    )
    names, texts = [], []
    for i, attack in enumerate(attacks):
        ((name, arguments), *more) = attack.items() if isinstance(attack, dict) and attack else [(attack, None)]
        if more or not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise ValueError(f"expected attack to list names, each with its arguments, got {attack!r}")
        names.append(name)
        texts += [f"{i}:{key}={value}" for key, value in (arguments or {}).items()]
    for text in own:
        numbered = isinstance(text, str) and text.partition(":")[0].isdecimal()
        if not numbered and (not isinstance(text, str) or "=" not in text or len(names) != 1):
            raise ValueError(f"expected attack_arg KEY=VALUE beside one attack, got {text!r} beside {names}")
        texts.append(text if numbered else f"0:{text}")
    return {key: value for key, value in (("attack", names), ("attack_arg", texts)) if value}


config_option = click.option(
    "--config", metavar="FILE", is_eager=True, expose_value=False, callback=read_config,
    help="YAML with these options as keys (for attack also a result.json: repeats that run); attacks with "
    "arguments as a list, attack: [NAME: {KEY: VALUE}, NAME]. Options given here win.",
)  # fmt: skip
