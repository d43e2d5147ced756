"""The command line's entrance: finds the subcommand, and turns errors into messages and exit codes.

0 done; 1 the run failed; 2 bad usage or input; 3 --strict and a warning stands; 130 interrupted.
"""

import importlib
import os
import sys

import click

from jem_robust import __version__

COMMANDS = {
    "attack": "Measure robustness: accuracy over perturbation size, with intervals.",
    "plot": "Draw several results in one figure.",
    "models": "List the embedded models with their cards.",
    "train": "Train a JEM or a plain classifier.",
}


class LazyGroup(click.Group):
    """Imports a subcommand's module only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"jem_robust.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of subcommands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="jem-robust")
def cli() -> None:
    """How robust is a JEM? White-box attacks through its SGLD refinement, judged on fresh noise.

    Example:  jem-robust attack --norm linf --steps 10
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. JEM_ROBUST_DEBUG=1 shows tracebacks instead of messages."""
    try:
        result = cli.main(arguments, prog_name="jem-robust", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        return 130
    except Exception as error:
        if os.environ.get("JEM_ROBUST_DEBUG"):
            raise
        # What a user handed over, or a machine lacks, is 2; a run that failed (DivergenceError, out of memory) is 1.
        code = 2 if isinstance(error, (ValueError, TypeError, ImportError, OSError)) else 1
        click.echo(f"Error: {error or type(error).__name__}", err=True)
        return code
    return result if isinstance(result, int) else 0
