"""The page of a run, of whatever its folder holds: whole, cut off, of another version, or hostile."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from bench.shapes import llama_shape
from megatrain.cli import main
from megatrain.errors import ConfigError, ExportError
from megatrain.html import table
from megatrain.plan import Question, find_plan, machine
from megatrain.run.history import read_history, traced_step
from megatrain.run.report import MOST_ROWS, render_report, write_report
from megatrain.schedule import chrome_trace
from megatrain.train.events import (
    Evaluated,
    Event,
    Planned,
    Replanned,
    Resumed,
    RolledBack,
    Sampled,
    Saved,
    Skipped,
    Warned,
)
from megatrain.train.metrics import JsonLines
from tests.bad_paths import ENDLESS, endless_file
from tests.html.reader import HOSTILE, read
from tests.train.test_metrics import stepped


def planned(model: str = "Llama") -> Planned:
    owners = {"host": {"optimizer state": 3_000, "weights": 2_000, "checkpoint": 0}}
    return Planned(0, model, {"model": model, "policy": "keeps all"}, 1.5, owners, owners)


def run(folder: Path, *events: Event, state: str = "finished", **status: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with JsonLines(folder / "metrics.jsonl") as watch:
        for event in events:
            watch(event)
    fields = {"state": state, "step": 3, "steps": 10, "heartbeat": time.time(), "error": None, "stalled": []} | status
    (folder / "status.json").write_text(json.dumps(fields))
    (folder / "config.yaml").write_text("train: {steps: 10}\n")
    return folder


def page(folder: Path) -> str:
    return write_report(folder).read_text()


def text(folder: Path) -> str:
    return read(page(folder)).text


def charts(folder: Path) -> Any:
    """What plotly is given for each chart of the page."""
    return json.loads(read(page(folder)).scripts[0])["charts"]


EVERYTHING: list[Event] = [
    planned(),
    stepped(1, 3.0),
    stepped(2, 2.5),
    Evaluated(2, 2.0),
    Saved(2, 2.0, 4_000, "runs/a/checkpoints/step-00000002", 1_000),
    Replanned(2, 2.0, 1.0, "weight_slots 2 -> 3"),
    stepped(3, 77.0),
    Evaluated(3, 9.0),
    Skipped(4, 10, "the loss is not finite", 1, 2.0, 8.0),
    RolledBack(4, 2, "the loss is not finite"),
    stepped(3, 2.25),
    Warned(3, "the disk is full"),
    Resumed(3, 10, "step-00000003"),
    Sampled(3, "def ", "f(x): <b>"),
]


def test_the_report_contains_every_event(tmp_path: Path) -> None:
    said = text(run(tmp_path / "a", *EVERYTHING))
    for part in (
        *("Llama: a", "finished", "3 of 10", "perplexity 7.389", "optimizer state", "keeps all", "the disk is full"),
        *("rolled back", "replanned", "weight_slots 2 -> 3", "resumed", "skipped", "def f(x): <b>", "steps: 10"),
        *("step-00000002", "removed", "3.00 kB", "no step was traced", "planned 1.50 s", "after step 3: def"),
    ):
        assert part in said, part
    assert "0 B" not in said
    names = [trace["name"] for trace in charts(tmp_path / "a")["loss"]["data"]]
    assert names == [
        "training",
        "validation",
        "undone by a rollback",
        "replanned",
        "skipped",
        "rolled back",
        "warning",
        "resumed",
    ]


def test_checkpoints_that_were_not_saved_are_marked_on_the_charts(tmp_path: Path) -> None:
    why = "not saved at step 2: the checkpoint of step 1 is still being written"
    folder = run(tmp_path / "a", stepped(1), stepped(2), Warned(2, why))
    (mark,) = [trace for trace in charts(folder)["loss"]["data"] if trace["name"] == "warning"]
    assert (mark["x"], mark["text"]) == ([2.0], [f"step 2: warning, {why}"])


def test_columns_of_words_are_aligned_left_and_numbers_right() -> None:
    found = read(table(("step", "event"), [("1", "resumed"), ("2", "/a/long/path" * 9)])).attributes
    assert [value for tag, name, value in found if tag in ("th", "td")] == ["words", "words", "words long"]


@pytest.mark.parametrize(
    ("prompt", "told"), [("今天天气怎么样" * 20, "今天天气怎么样今天"), ("a\n b", "a b"), ("x" * 60, "x" * 60)]
)
def test_the_heading_of_a_sample_has_the_beginning_of_its_prompt(tmp_path: Path, prompt: str, told: str) -> None:
    """Of a script without spaces, too."""
    assert f"after step 3: {told}" in text(run(tmp_path / "a", *EVERYTHING[:-1], Sampled(3, prompt, "")))


def test_mfu_recorded_by_earlier_versions_is_read(tmp_path: Path) -> None:
    path = run(tmp_path, *EVERYTHING) / "metrics.jsonl"
    known = read_history(tmp_path).columns["mfu"]
    path.write_text(path.read_text().replace('"mfu"', '"light_share"'))
    assert read_history(tmp_path).columns["mfu"] == known
    assert all(share > 0 for share in known)


def test_rolled_back_steps_are_shown_but_not_counted(tmp_path: Path) -> None:
    found = read_history(run(tmp_path / "a", *EVERYTHING))
    assert list(found.columns["loss"]) == [3.0, 2.5, 2.25]
    assert found.undone == [(3.0, 77.0)]
    assert [(held.step, held.loss) for held in found.evaluated] == [(2, 2.0)]
    assert list(found.tiers["host"]) == [1 << 20] * 3


def test_the_report_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    html = page(run(tmp_path / "a", *EVERYTHING))
    reader = read(html)
    assert {name for _, name, _ in reader.attributes} & {"src", "href", "action", "srcset", "background"} == set()
    ours = html.replace(get_plotlyjs(), "")  # which names maps and fonts that it is not asked for, and could not load
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|import\(", ours)
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    folder = run(
        tmp_path / "a",
        planned(HOSTILE),
        stepped(1),
        Sampled(1, HOSTILE, HOSTILE),
        Warned(1, HOSTILE),
        Saved(1, 1.0, 1, HOSTILE),
        state=HOSTILE,
        error=HOSTILE,
        stalled=[HOSTILE],
    )
    (folder / "config.yaml").write_text(HOSTILE)
    reader = read(page(folder))
    assert reader.count["img"] == 0
    assert reader.count["script"] == 3  # data, plotly, and what draws with it
    assert reader.text.count(HOSTILE) >= 7


def test_killed_and_running_runs_are_distinguished(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", stepped(1), state="running", heartbeat=time.time() - 3600)
    assert "probably killed" in text(folder)
    assert "probably killed" not in text(run(tmp_path / "a", stepped(1), state="running"))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "stepped", "step": 2, "lo')  # torn
    assert read_history(folder).done == 1


@pytest.mark.parametrize(
    "line", ["", "[]", "3", '{"event": "stepped"}', '{"event": "new", "step": 1}', '{"step": "x"}', "\udc80"]
)
def test_metric_lines_of_other_versions_are_ignored(line: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "a", stepped(1))
    with (folder / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.write(line + '\n{"event": "stepped", "step": 2, "loss": null}\n')
    found = read_history(folder)
    assert list(found.columns["step"]) == [1, 2]
    assert len(found.tiers["host"]) == 2
    read(render_report(found, 0.0))


def test_a_report_needs_only_the_metrics_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "a", stepped(1))
    (folder / "status.json").write_text("{")
    (folder / "config.yaml").unlink()
    with pytest.raises(SystemExit) as left:
        main(["report", str(folder), "--html", str(tmp_path / "page.html")])
    assert left.value.code == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert "there is no status.json" in read((tmp_path / "page.html").read_text()).text
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl; name the folder of a run"):
        write_report(tmp_path)
    with pytest.raises(ExportError, match="cannot be written"):
        write_report(folder, tmp_path / "absent" / "page.html")
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "trace.json", "config.yaml"])
def test_endless_metrics_files_are_not_read(name: str, kind: str, tmp_path: Path) -> None:
    run(tmp_path, *EVERYTHING)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    endless_file(kind, path)
    if name == "metrics.jsonl" and kind != "deep":
        with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read \(a (pipe|device), not a file"):
            page(tmp_path)
    else:
        assert "steps" in text(tmp_path)


def test_a_traced_step_is_told_with_what_it_waited_for(tmp_path: Path) -> None:
    question = Question(llama_shape("model", 6, 512, vocabulary=4000), machine("rtx-4090"), 16_384, 1024)
    timeline = find_plan(question).timeline
    trace = json.loads(json.dumps(chrome_trace([timeline, timeline]) | {"waits": {"fetch": timeline.seconds / 4}}))
    found = traced_step(trace)
    assert found is not None
    assert found.seconds == pytest.approx(timeline.seconds, abs=1e-8)
    assert found.waits == {"bus up": pytest.approx(timeline.seconds / 4)}
    assert traced_step(None) is traced_step({"traceEvents": []}) is None
    folder = run(tmp_path / "a", *EVERYTHING)
    (folder / "trace.json").write_text(json.dumps(trace))
    assert "Compute waited for: bus up 25.0%" in text(folder)


def test_long_tables_are_truncated_and_counted(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", stepped(1), *(Warned(step, f"warning {step}") for step in range(1, 1001)))
    said = text(folder)
    assert "warning 1000" in said
    assert "warning 500" not in said
    assert f"{1000 - MOST_ROWS:,} more" in said


@pytest.mark.slow
def test_a_report_of_a_million_steps_is_two_megabytes(tmp_path: Path) -> None:
    found = read_history(run(tmp_path / "a", stepped(1)))
    for column in (*found.columns.values(), *found.tiers.values()):
        column.extend(column * 999_999)
    found.columns["step"][:] = type(found.columns["step"])("d", np.arange(1, 1_000_001).tolist())
    found.columns["loss"][543_210] = 99.0
    began = time.perf_counter()
    html = render_report(found, 0.0)
    assert time.perf_counter() - began < 20
    assert len(html) - len(get_plotlyjs()) < 2_000_000
    assert "99.0" in html


def test_rollbacks_are_remembered_when_resuming_before_the_failed_step(tmp_path: Path) -> None:
    first = [stepped(step, float(step)) for step in (1, 2, 3, 4)]
    again = [stepped(step, 10.0 + step) for step in (2, 3)]
    folder = run(tmp_path / "a", *first, RolledBack(4, 1, "the loss is not finite"), *again)
    with JsonLines(folder / "metrics.jsonl", 3) as watch:  # resumed after step 3, in the second pass
        watch(stepped(4, 14.0))
    assert list(read_history(folder).columns["step"]) == [1.0, 2.0, 3.0, 4.0]
    assert list(read_history(folder).columns["loss"]) == [1.0, 12.0, 13.0, 14.0]


def test_only_cross_entropy_has_a_perplexity(tmp_path: Path) -> None:
    said = text(run(tmp_path / "a", planned(), stepped(1), Evaluated(1, 0.69, {"rewards/margins": 0.1})))
    assert "0.6900" in said
    assert "perplexity" not in said


def test_long_curves_are_smoothed_and_distinguishable(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", *(stepped(step, 10.0 / step) for step in range(1, 101)))
    raw, mean = charts(folder)["loss"]["data"]
    assert (raw["name"], mean["name"]) == ("training", "training, mean of 5 steps")
    assert raw["opacity"] < mean["opacity"]
    assert mean["y"][50] == pytest.approx(sum(10.0 / step for step in range(49, 54)) / 5, rel=1e-5)


def test_the_commands_of_the_guide_write_the_pages_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "reports.md").read_text()
    (block,) = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    run(Path("runs") / "start", *EVERYTHING)
    for line in block.splitlines():
        with pytest.raises(SystemExit) as left:
            main(shlex.split(line, comments=True)[1:])
        assert left.value.code == 0
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert written == {"runs/start/report.html", "start.html"}
    assert all(Path(path).name in block for path in written)
