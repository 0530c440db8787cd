"""`megatrain verify`: compare the engine with the stock Hugging Face code for an architecture, as a table."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain.model import listed, model_named, non_finite_weights
from megatrain.model.architecture import read_config
from megatrain.train.engine import unverified
from megatrain.train.parity import full_report, verify_rows


def run_verification(model: str, console: Console, *, attention: str = "auto", trust_remote_code: bool = False) -> bool:
    """Compare a small model of the same architecture with the stock code and print a table; returns whether all agree.

    model: model folder, run folder, hub name or `config.json`. The comparison uses no weights of it, but the weights in
    a folder are checked for values that are not finite. attention: kernel; `auto`: the one transformers chooses.
    Raises `ModelError` for a model that cannot be compared or that the engine refuses.
    """
    named = model_named(model)
    config = read_config(named, where=f"model {model}", trust_remote_code=trust_remote_code)
    with console.status("comparing"):
        report = full_report(config, unverified, None if attention == "auto" else attention)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("parameters")
    table.add_column("worst relative error", justify="right")
    table.add_column("verdict")
    for group, error, verdict in verify_rows(report):
        table.add_row(Text(group), error, Text(verdict))
    console.print(table)
    console.print(Text(f"attention: {report.attention}"))
    for what in report.left_out:
        console.print(Text(f"not compared: {what}", "yellow"), soft_wrap=True)
    with console.status("reading the weights"):
        not_finite = non_finite_weights(named, config)
    if not_finite:
        console.print(Text(f"weights that are not finite: {listed(not_finite)}", "red"), soft_wrap=True)
    return report.ok and not not_finite
