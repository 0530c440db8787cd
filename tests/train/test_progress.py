"""What a person sees: the plan, the line, the summary."""

from __future__ import annotations

import io
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from rich.console import Console

from megatrain.plan import Choice
from megatrain.spec import Numerics, Placement, Policy
from megatrain.train.events import Ended, Evaluated, Sampled, Skipped, Stepped
from megatrain.train.progress import (
    HINT,
    RANKS_HINT,
    ProgressLine,
    describe_activations,
    describe_policy,
    line_fields,
    metric,
    preparing,
    printable,
    show_plan,
)


def stepped(step: int, steps: int = 10, seconds: float = 2.0) -> Stepped:
    return Stepped(
        step=step,
        steps=steps,
        loss=5.0 - step / 10,
        grad_norm=0.5,
        lr=1e-3,
        tokens=1000,
        seconds=seconds,
        data_seconds=0.0,
        stall_seconds=0.2,
        flops=4e9,
        peak_flops=1e10,
        nbytes={"device": 3 << 20, "host": 5 << 30},
        elapsed_seconds=2.0 * step,
    )


def test_the_slowest_rank_is_shown_and_explained() -> None:
    event = replace(stepped(1), slowest=(3, 1.25))
    assert "slowest rank 3 1.25x" in shown(event)
    assert RANKS_HINT in told(event)
    assert "slowest" not in told(stepped(1))


def shown(*events: Any, **how: Any) -> str:
    """What is told beneath the hint."""
    return told(*events, **how).replace(HINT + "\n", "")


def told(*events: Any, log_every: int = 3, terminal: bool = False, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    with ProgressLine(console, log_every) as watch:
        for event in events:
            watch(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_lines_appear_first_periodically_and_last() -> None:
    text = shown(*(stepped(step) for step in range(1, 11)))
    assert [line.split("/")[0].split()[1] for line in text.splitlines()] == ["1", "3", "6", "9", "10"]
    assert "\x1b" not in text


def test_the_progress_line_is_complete() -> None:
    text = shown(stepped(5), log_every=1)
    assert text.strip() == (
        "step  5/10  loss 4.500  0:10 left    500 tok/s  MFU 20%  grad 0.50  stall 10%  device 3.15 MB  host 5.37 GB"
    )


def test_progress_terms_are_explained_once_before_the_first_line() -> None:
    lines = told(*(stepped(step) for step in range(1, 11))).splitlines()
    assert [line for line in lines if "MFU:" in line] == lines[:1]
    assert "MFU:" in told(stepped(1), terminal=True)


def test_the_progress_line_shows_epochs_and_only_used_memory() -> None:
    event = replace(stepped(5), epoch=1.5, epochs=3.0, nbytes={"device": 0, "host": 5 << 30})
    text = shown(event, replace(stepped(6), epoch=1.8), log_every=1)
    assert "step  5/10  epoch 1.50/3  loss 4.500" in text
    assert "epoch 1.80  loss" in text
    part = shown(replace(stepped(5), epoch=0.03, epochs=0.065), log_every=1)
    assert "epoch" not in part.partition("step  5")[2]  # less than one pass: the steps say as much
    assert "device" not in text.splitlines()[0]


def test_on_a_terminal_the_line_is_drawn_in_place_and_fits() -> None:
    text = shown(*(stepped(step) for step in range(1, 11)), terminal=True, width=60)
    assert text.count("\n") <= 2
    lines = [line for line in re.sub(r"\x1b\[[?\d]*[A-Za-z]", "\r", text).split("\r") if "step" in line]
    assert len(lines) >= 10
    assert max(len(line.rstrip("\n")) for line in lines) < 60


def test_the_shown_loss_is_a_running_mean() -> None:
    lines = shown(*(stepped(step) for step in range(1, 11)), Ended(10, 10, 20.0), log_every=5).splitlines()
    assert [line.split("loss ")[1][:5] for line in lines[:3]] == ["4.900", "4.700", "4.200"]
    assert lines[-1] == "10 steps in 20.0 s; 10.0k tokens at 500 a second; loss from 4.900 to 4.200"


def test_skipped_steps_lower_the_reported_speed() -> None:
    skipped = Skipped(2, 10, "the loss is not finite", 1, seconds=2.0, elapsed_seconds=4.0)
    texts = line_fields(stepped(3), [stepped(1), skipped, stepped(3)])
    assert "  333 tok/s" in texts
    assert "MFU 13%" in texts


def test_printable_text_has_no_control_characters() -> None:
    assert printable("a\tb\n\x1b[2J\x07é\u200e") == "a\tb\n\ufffd[2J\ufffdé\ufffd"


def test_skips_validation_samples_and_the_end_are_reported() -> None:
    text = shown(
        stepped(1),
        Skipped(2, 10, "layer 4: the gradient is not finite", 1, 2.0, 4.0),
        Evaluated(2, 3.25),
        Sampled(2, "def ", "f():\n\x1b[2J    return [bold]1"),
        Ended(2, 10, 65.0),
    )
    assert "step 2 skipped: layer 4: the gradient is not finite" in text
    assert "step 2  validation loss 3.250" in text
    assert "  | def f():\n  | \N{REPLACEMENT CHARACTER}[2J    return [bold]1\n" in text
    assert "stopped after 2 of 10 steps in 65.0 s; 1.00k tokens at 250 a second; loss from 4.900 to 4.900" in text


def test_the_failing_step_is_reported_by_its_error() -> None:
    assert "nan" not in shown(Skipped(2, 10, "the loss is nan", 3, 2.0, 4.0, ends=True))


def test_a_run_without_a_finite_step_has_a_summary() -> None:
    assert shown(Ended(0, 10, 1.0)).strip() == "stopped after 0 of 10 steps in 1.00 s"


OTHER: dict[str, Any] = {
    "precision": "fp32",
    "read_ahead_nbytes": 1 << 20,
    "weight_slots": 5,
    "grad_slots": 5,
    "shard_nbytes": 1 << 20,
    "activations": "keep",
    "activations_by_layer": (("graph",), ("drop", "offload")),
    "offload_slots": 3,
    "micro_batches_per_round": 2,
    "recompute_slots": 1,
    "grad_precision": "fp32",
    "update": "during_backward",
    "streamed_updates": 0.5,
    "loss_chunk_tokens": 77,
    "mlp_chunk_tokens": 4096,
    "kernels": "fused",
    "wait_for": "shard",
    "shares_memory": True,
    "host_threads": 3,
    "transfer": "pageable",
    "pinned_staging_slots": 3,
    "delivery": "shared",
    "placements": (Placement(moments="disk"),),
    "disk_staging_slots": 4,
}


@pytest.mark.parametrize("name", [field.name for each in (Numerics, Policy) for field in fields(each)])
def test_no_field_of_the_policy_is_silent(name: str) -> None:
    plain = Choice(Numerics(), Policy(placements=(Placement(low_bits="disk"),)))
    other = plain.change(**{name: OTHER[name]})
    assert describe_policy(other.numerics, other.policy) != describe_policy(plain.numerics, plain.policy)


def test_a_policy_is_told_by_the_keys_of_a_configuration() -> None:
    told = describe_policy(Numerics("fp32"), Policy(weight_slots=3, shares_memory=True, update="during_backward"))
    assert told[0] == "recomputes each layer in the backward pass"
    assert {"precision fp32", "weight_slots 3", "shares_memory", "update during_backward"} <= {*told}
    assert not [
        each for each in told if each.startswith(("read_ahead_nbytes", "host_threads", "streamed_updates", "disk_"))
    ]


def test_offloaded_activations_are_said_to_be_in_host_memory() -> None:
    rows = (("offload_attention", "attention"), ("offload", "drop"))
    assert describe_activations(Policy(activations_by_layer=rows)) == (
        "keeps attention of 25% of the layers in host memory, attention of 25% of the layers, "
        "the input of 25% of the layers in host memory, nothing of 25% of the layers"
    )


def test_the_plan_shows_what_a_tier_holds_between_steps_by_owner_and_its_peak() -> None:
    console = Console(file=io.StringIO(), width=100)
    memory = {("device", "slots"): 3 << 20, ("host", "weights"): 1 << 20, ("host", "optimizer state"): 5 << 20}
    peaks = {"device": 4 << 20, "host": 7 << 20, "disk": 0}
    show_plan(console, [("model", "tiny")], memory, peaks, Numerics(), Policy())
    assert isinstance(console.file, io.StringIO)
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["memory", "what", "for", "held", "between", "steps", "peak", "within", "a", "step"] in rows
    assert ["host", "optimizer", "state", "5.24", "MB"] in rows
    assert ["host", "total", "6.29", "MB", "7.34", "MB", "planned"] in rows
    assert ["device", "slots", "3.15", "MB"] in rows
    assert ["device", "total", "3.15", "MB", "4.19", "MB", "planned"] in rows
    assert ["model", "tiny"] in rows


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00k"),
        (1234, "1.23k"),
        (99_950, "100k"),
        (14_359_680, "14.4M"),
        (70_553_706_496, "70.6B"),
        (5e15, "5000T"),
    ],
)
def test_metric_has_three_digits(number: float, text: str) -> None:
    assert metric(number) == text


def test_data_is_reported_by_source_with_its_share() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with preparing(console) as tell:
        tell("a[b].jsonl", 1234, None)
        tell("a[b].jsonl", 5000, 10_000)
    assert isinstance(console.file, io.StringIO)
    said = re.sub("\x1b\\[[^a-zA-Z]*[a-zA-Z]", "", console.file.getvalue())
    assert "preparing the data: 5,000 samples of a[b].jsonl" in said
    assert " 50%" in said
