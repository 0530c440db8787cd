"""The command line: `megatrain COMMAND ...`. Commands import what they need when they run, so that `--help` is quick.

A user's mistake (`MegaTrainError`, or a malformed command) gives one line on stderr and exit code 2; Ctrl-C gives 130.
Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import atexit
import difflib
import errno
import gc
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from megatrain.errors import ConfigError, MegaTrainError
from megatrain.system.environment import (
    find_launch,
    let_idle_threads_sleep,
    let_ranks_finish,
    refuse_several_processes,
    tell_torchrun,
)

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain.config import Config

USER_ERROR, MISMATCH, INTERRUPTED = 2, 1, 130

# ClickException, the base of errors in a command's arguments, which typer does not export.
_MalformedCommand: type[Exception] = typer.BadParameter.__mro__[2]


class _Verbs(TyperGroup):
    """The commands; an error for an unknown one names the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            nearest = difflib.get_close_matches(args[0], self.commands, n=1)
            fix = f"did you mean {nearest[0]!r}?" if nearest else f"the commands are {', '.join(self.commands)}"
            raise ConfigError(f"unknown command {args[0]!r}", fix=fix)
        return super().resolve_command(ctx, args)


def _path(to_write: Literal["", "folder", "file"] = "") -> Any:
    """Callback that checks arguments and options that are paths; `usable_path` says what is refused."""

    def check(param: typer.CallbackParam, value: str | list[str] | None) -> str | list[str] | None:
        from megatrain.system.paths import usable_path

        where = param.opts[0] if param.opts[0].startswith("-") else str(param.metavar)
        for each in [value] if isinstance(value, str) else value or []:
            usable_path(each, where=where, to_write=to_write)
        return value

    return check


app = typer.Typer(
    cls=_Verbs, invoke_without_command=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _show_version(asked: bool) -> None:
    """Print the versions of MegaTrain and of the libraries that affect its numbers, without importing those."""
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        from megatrain.version import __version__

        others = []
        for name in ("torch", "transformers"):
            with suppress(PackageNotFoundError):
                others.append(f"{name} {version(name)}")
        typer.echo(f"megatrain {__version__} ({', '.join((*others, f'python {platform.python_version()}'))})")
        raise typer.Exit


@app.callback()
def _about(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Full-precision training of any Hugging Face causal language model on one machine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        return
    if context.invoked_subcommand != "train":
        refuse_several_processes(f"megatrain {context.invoked_subcommand}")


@app.command("train")
def _train(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/quickstart.yaml.", callback=_path())
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to set, e.g. train.steps=100.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List all configuration keys and exit.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that share the model, one per GPU here.")] = 1,
) -> None:
    """Train a model."""
    from megatrain.config import describe_keys, load_config

    if keys:
        for key, kind, default, meaning in describe_keys():
            head = f"{key} = {default}" if default else f"{key}  (required)"
            typer.echo(f"{head}    [{kind}]\n    {meaning}")
        return
    if config is None:
        raise ConfigError("CONFIG is missing", where="megatrain train", fix="write one with `megatrain init`")
    checked = load_config(config, overrides or ())
    if find_launch() is None:  # ranks check after they have joined, so that all learn what is wrong on one of them
        _refuse_early(checked)
    if ranks > 1:
        _launch(ranks, "train", config, *(overrides or ()))
    let_idle_threads_sleep()
    from rich.console import Console

    from megatrain.run.training import run_training

    output: Any = sys.stdout and TolerantOutput(sys.stdout, _tell)  # none where it was closed
    run_training(checked, Console(file=output, highlight=False))


class TolerantOutput:
    """A text stream that loses what cannot be written; `tell` gets the first failure as a line.

    A log on a full disk, or a terminal that has gone while the run goes on (`nohup`, `disown`), would otherwise end a
    run of weeks by an `OSError` in the line that reports a step. A closed pipe still ends it, as it ends any program.
    """

    def __init__(self, stream: TextIO, tell: Callable[[str], object]) -> None:
        self._stream, self._tell, self._failed = stream, tell, False

    def write(self, text: str) -> int:
        """Write, or lose, the text."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            if not self._failed:
                self._failed = True
                with suppress(OSError):
                    self._tell(f"output cannot be written ({error.strerror or error}); the run goes on without it")


def _refuse_early(config: Config) -> None:
    """Raise the errors that can be found before torch is imported, which takes seconds."""
    from megatrain.run.early_checks import refuse_mistakes
    from megatrain.run.existing_run import refuse_early

    refuse_mistakes(config)
    refuse_early(config)


def _launch(ranks: int, *arguments: str) -> NoReturn:
    """Start `ranks` processes with these arguments, and end as they do."""
    refuse_several_processes("--ranks")
    let_ranks_finish()
    from megatrain.dist.launch import launch

    sys.exit(launch(ranks, "megatrain", *arguments, tell=_refuse))


BaseName = Annotated[
    str | None, typer.Option(help="Base of the adapter, if it is not where the adapter says it is.", callback=_path())
]
AdapterName = Annotated[
    str | None, typer.Option(help="Train an adapter on the frozen model: lora, lora:16 or lora:16:all-linear.")
]


@app.command("init")
def _init(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="YAML file to write.", callback=_path("file"))
    ] = "config.yaml",
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name; for a fresh model also a config.json.", callback=_path())
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="File, folder or hub name; can be repeated.", callback=_path())
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train a fresh model of this architecture and size.")
    ] = False,
    hardware: Annotated[
        str | None, typer.Option(help="Built-in machine name or a probe file; default: this machine.", callback=_path())
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens per training sequence.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10**18, help="Optimizer steps; default: three epochs over samples.")
    ] = None,
    folder: Annotated[str, typer.Option(help="Run folder.", callback=_path("folder"))] = "runs/new",
    disk: Annotated[
        list[str] | None,
        typer.Option(help="Folder on a fast drive for state that does not fit into memory.", callback=_path("folder")),
    ] = None,
    adapter: AdapterName = None,
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    source: Annotated[
        str | None, typer.Option("--from", help="LLaMA-Factory YAML to translate.", callback=_path())
    ] = None,
) -> None:
    """Write a configuration from a few answers, and plan it. Asks for what is not given."""
    let_idle_threads_sleep()
    from megatrain.system.paths import usable_path

    target = usable_path(file, where="FILE", to_write="file")
    if source is not None:
        _translate(context, source, target, hardware)
        return
    from megatrain.commands.init import Answers, write_recipe

    if model is None:
        model = _asked("--model", "Which model (folder, hub name or config.json)?")
    if not data:
        data = (
            _asked("--data", "Which data (files, folders or hub names, with commas between)?").replace(",", " ").split()
        )
    given = {name: value for name, value in context.params.items() if name not in ("file", "source")}
    lists = {"data": tuple(data), "disk": tuple(disk or ())}
    plan = write_recipe(Answers(**{**given, **lists, "model": model, "precision": _precision(precision)}), target)
    typer.echo(f"{target}: {plan.tokens_per_second:,.0f} tokens/s on {plan.question.hardware.name}")
    typer.echo(f"megatrain train {target}")


def _translate(context: typer.Context, source: str, target: Path, hardware: str | None) -> None:
    """Translate another trainer's YAML and report the keys that were not simply taken over."""
    given = [name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    if others := sorted(set(given) - {"file", "source", "hardware"}):
        what = f"--{others[0].replace('_', '-')} cannot be combined with --from"
        raise ConfigError(what, where="megatrain init", fix=f"leave it out, and edit {target} afterwards")
    from megatrain.commands.init import write_translation
    from megatrain.system.paths import usable_path

    lines = write_translation(usable_path(source), target, hardware)
    typer.echo("\n".join([f"{target}: translated from {source}", *lines, f"megatrain train {target}"]))


def _asked(option: str, question: str) -> str:
    """Ask the user. Raises `ConfigError` if there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{option} is missing", where="megatrain init", fix=f"give it as {option} VALUE")
    return str(typer.prompt(question))


Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Attention = Annotated[str, typer.Option(help="Attention kernel: auto, sdpa, eager, flash_attention_2, ...")]
DeviceName = Annotated[str, typer.Option(help="cpu, cuda:0 or sim:SEED (a simulator for tests).")]
PrecisionName = Annotated[str, typer.Option(help="bf16 or fp32.")]


@app.command("plan")
def _plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, run folder, hub name, config.json, saved plan, or the CONFIG of a run.",
            callback=_path(),
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of CONFIG to set, e.g. train.epochs=2.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Built-in machine (h200, rtx-4090, ...) or a probe file.", callback=_path())
    ] = None,
    tokens_per_step: Annotated[int | None, typer.Option(min=1, help="Tokens in all sequences of a step.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence.")] = None,
    precision: PrecisionName = "bf16",
    clip: Annotated[bool, typer.Option(help="Clip gradients by their global norm.")] = True,
    device_memory: Annotated[str | None, typer.Option(help="Limit, e.g. 24GB or 80%.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Limit, e.g. 512GB.")] = None,
    disk_memory: Annotated[str | None, typer.Option(help="Limit of the disk tier, e.g. 2TB; 0: no disk.")] = None,
    token_budget: Annotated[
        float | None, typer.Option(help="Tokens to train on, e.g. 1e9, to get the length of a run.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the numbers to this file.", callback=_path("file"))] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Write the step, op by op, for Perfetto or chrome://tracing.", callback=_path("file")),
    ] = None,
    adapter: AdapterName = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw (default), lion or muon, which keep less.")] = None,
    attention: Attention = "auto",
    trust_remote_code: Remote = False,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs that train together, on all machines.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
) -> None:
    """Predict memory and time of a step, and what would help. Reads no weights."""
    let_idle_threads_sleep()
    from rich.console import Console

    from megatrain.commands.plan import Options, run_plan

    given = {name: value for name, value in context.params.items() if name != "model"}
    options = Options(**{**given, "precision": _precision(precision), "overrides": overrides or ()})
    run_plan(model, Console(highlight=False), options)


@app.command("verify")
def _verify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, run folder, hub name or config.json.", callback=_path())
    ],
    attention: Attention = "auto",
    trust_remote_code: Remote = False,
) -> None:
    """Compare loss and all gradients with the stock code's. Uses a small model of the same architecture."""
    let_idle_threads_sleep()
    _refuse_absent(model)
    from rich.console import Console

    from megatrain.commands.verify import run_verification

    console = Console(highlight=False)
    if not run_verification(model, console, attention=attention, trust_remote_code=trust_remote_code):
        raise typer.Exit(MISMATCH)


@app.command("generate")
def _generate(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Model folder, run folder or hub name.", callback=_path())
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue; with --chat a question.")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt, or each line of the input, as a chat.")
    ] = False,
    system: Annotated[str, typer.Option(help="System prompt of each question.")] = "",
    device: DeviceName = "cpu",
    precision: PrecisionName = "bf16",
    base: BaseName = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to generate; default: 200.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0: always the most likely token.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from this many most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens up to this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the sampling.")] = 0,
    trust_remote_code: Remote = False,
) -> None:
    """Continue a text, or answer questions, with a model of any size. It streams through the device."""
    let_idle_threads_sleep()
    if system and not chat:
        raise ConfigError("needs --chat", where="--system", fix="add --chat")
    precision = _precision(precision)
    _refuse_absent(folder)
    from rich.console import Console

    from megatrain.commands.generate import GenerationModel, run_chat, run_generation
    from megatrain.run.sampling import Sampling
    from megatrain.train.progress import loading

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)

    def heard(text: str) -> None:
        typer.echo(text, nl=False)

    with loading(Console(stderr=True), "loading the model") as progress:
        generator = GenerationModel(
            folder,
            device=device,
            precision=precision,
            base=base,
            trust_remote_code=trust_remote_code,
            progress=progress,
            notice=_tell,
        )
        if chat:
            lines = (line.strip() for line in sys.stdin if line.strip())
            run_chat(generator, [prompt] if prompt else lines, heard, sampling, system=system)
            return
        spoken = run_generation(generator, prompt, heard, sampling)
    typer.echo("")
    typer.echo(spoken.summary(), err=True)


@app.command("export")
def _export(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Model folder, run folder or hub name.", callback=_path())
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Folder to write.", callback=_path("folder"))],
    precision: PrecisionName = "bf16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing model in TARGET.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter SOURCE into its base model.")] = False,
    base: BaseName = None,
    trust_remote_code: Remote = False,
) -> None:
    """Write a model as a Hugging Face folder. The folder is complete or not there."""
    let_idle_threads_sleep()
    precision = _precision(precision)
    _refuse_absent(source)
    from megatrain.run.existing_run import holds_model
    from megatrain.system.paths import usable_path

    holds_model(usable_path(target), overwrite=overwrite)
    from rich.console import Console

    from megatrain.commands.export import ModelToRead, run_export
    from megatrain.train.progress import loading

    with loading(Console(stderr=True), "writing the model") as progress:
        written = run_export(
            ModelToRead(source, base, trust_remote_code),
            target,
            precision=precision,
            overwrite=overwrite,
            merge=merge,
            progress=progress,
            notice=_tell,
        )
    typer.echo(str(written))


@app.command("probe")
def _probe(
    device: DeviceName = "cpu",
    path: Annotated[str, typer.Option(help="Folder on the disk to measure.", callback=_path("folder"))] = ".",
    output: Annotated[
        str | None,
        typer.Option(help="File to write; default: the one that plan and train look for.", callback=_path("file")),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Seconds to measure for.")] = 45.0,
) -> None:
    """Measure this machine in under a minute, for `plan` and `train`."""
    let_idle_threads_sleep()
    from megatrain.commands.probe import probe
    from megatrain.device import open_device
    from megatrain.plan import save_hardware
    from megatrain.run.this_machine import PROBED
    from megatrain.system.paths import usable_path

    target = usable_path(output or PROBED, where="--output", to_write="file")
    opened = open_device(device)
    try:
        hardware = probe(opened, usable_path(path, where="--path", to_write="folder"), seconds, say=typer.echo)
    finally:
        opened.close()
    save_hardware(hardware, target)
    typer.echo(f"{target}: {hardware.name}")


def _refuse_absent(model: str) -> None:
    """Raise the error for a model that is neither on this machine nor on the hub, before anything slow is imported."""
    from megatrain.plan.measured_models import refuse_absent

    refuse_absent(model)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _precision(name: str) -> Literal["bf16", "fp32"]:
    if name not in ("bf16", "fp32"):
        raise ConfigError(f"unknown precision {name!r}", where="--precision", fix="use bf16 or fp32")
    return "bf16" if name == "bf16" else "fp32"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    atexit.register(_leave_plans)
    code: object = 0
    try:
        code = app(None if arguments is None else list(arguments), prog_name="megatrain", standalone_mode=False)
    except MegaTrainError as error:
        code = USER_ERROR if tell_torchrun(str(error)) else _refuse(str(error))
    except _MalformedCommand as error:
        code = _refuse(getattr(error, "format_message", error.__str__)())
    except MemoryError:
        code = _refuse("out of memory: the system gave no more; free some, or raise the process's limit")
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        code = _refuse("the system starts no more threads; end other processes, or raise their limit (ulimit -u, pids)")
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _leave_plans() -> None:
    """Let no collector walk through plans once more as the process ends. Beside torch it does: its libraries take for
    leaks, and tell so, what has not been collected by then."""
    if "torch" not in sys.modules:
        gc.freeze()


def _refuse(message: str) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return USER_ERROR
