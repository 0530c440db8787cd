"""The command line: `megatrain VERB ...`. Verbs import what they need when they run, so that `--help` is quick.

A user's mistake (`MegaTrainError`, or a malformed command) is one line on stderr and exit code 2; Ctrl-C is 130. A
traceback means a defect of ours, so any other exception keeps its own.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megatrain.errors import ConfigError, MegaTrainError

USER_ERROR, INTERRUPTED = 2, 130

# The base of what a malformed command raises, which typer does not export by name: ClickException.
_MalformedCommand: type[Exception] = typer.BadParameter.__mro__[2]


class _Verbs(TyperGroup):
    """The verbs; an unknown one is answered with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            nearest = difflib.get_close_matches(args[0], self.commands, n=1)
            fix = f"did you mean {nearest[0]!r}?" if nearest else f"the verbs are {', '.join(self.commands)}"
            raise ConfigError(f"no verb is called {args[0]!r}", fix=fix)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Verbs,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _about(context: typer.Context) -> None:
    """Full-precision training of any Hugging Face causal language model on one machine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("train")
def _train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file, configs/quickstart.yaml say.")] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys to set, train.steps=100 say.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key of CONFIG with its default, and leave.")] = False,
) -> None:
    """Train a model as CONFIG says."""
    from megatrain.config import describe_keys, let_idle_threads_sleep, load_config

    if keys:
        for key, default, meaning in describe_keys():
            typer.echo(f"{key} = {default}\n    {meaning}" if default else f"{key}  (required)\n    {meaning}")
        return
    if not config:
        raise ConfigError("which CONFIG?", where="megatrain train", fix="try configs/quickstart.yaml")
    checked = load_config(config, overrides or ())
    let_idle_threads_sleep()
    from rich.console import Console

    from megatrain.run import run_training

    run_training(checked, Console(highlight=False))


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: runs a verb and leaves the process with its exit code."""
    code: object = 0
    try:
        code = app(None if arguments is None else list(arguments), prog_name="megatrain", standalone_mode=False)
    except MegaTrainError as error:
        code = _refuse(str(error))
    except _MalformedCommand as error:
        code = _refuse(getattr(error, "format_message", error.__str__)())
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return USER_ERROR
