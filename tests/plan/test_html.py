"""The page of a plan stands alone, holds what the plan holds, and survives hostile names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import llama_shape
from megatrain.plan import Outlook, Question, advised, find_plan, look, machine, render_page
from megatrain.plan.report import as_content, gains, memory, without_gain

HOSTILE = "</script><script>alert('1')</script><img src=http://evil.example/x>&\u2028"
VOID = ("meta", "br", "img", "link", "input")


class Reader(HTMLParser):
    """Checks that elements close in order, and collects what there is."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.count: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


@cache
def outlook() -> Outlook:
    model = llama_shape("model", 6, 512, vocabulary=4000)
    return advised(look(find_plan(Question(model, replace(machine("rtx-4090"), name="a model"), 16_384, 1024))))


@cache
def full_page(name: str = "model") -> str:
    """The page of a plan, whatever its model and machine are called."""
    plan = outlook().plan
    asked = plan.question
    named = replace(asked, model=replace(asked.model, name=name), hardware=replace(asked.hardware, name=f"a {name}"))
    return render_page(replace(outlook(), plan=replace(plan, question=named)), [("model", name)])


def test_the_page_loads_no_external_resource() -> None:
    page = full_page()
    reader = read(page)
    assert {name for _, name, _ in reader.attributes} & {"src", "href", "action", "srcset", "background"} == set()
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    policy = next(value for _, name, value in reader.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'")


def test_the_pages_data_equals_the_plan() -> None:
    plan = outlook().plan
    content = json.loads(read(full_page()).scripts[0])
    expected = json.loads(json.dumps(as_content(outlook())))
    timeline = content.pop("timeline")
    assert content == expected
    ops = plan.timeline.schedule.ops
    assert timeline["seconds"] == plan.seconds
    assert len(timeline["ops"]) == len(ops)
    for op, row, start, end in zip(ops, timeline["ops"], plan.timeline.starts, plan.timeline.ends, strict=True):
        assert timeline["kinds"][row[0]]["name"] == op.kind
        assert row[2:6] == [op.unit, op.micro, op.shard, op.nbytes]
        assert row[6:] == pytest.approx([start, end], rel=1e-8)


def test_the_page_and_the_terminal_agree() -> None:
    text = read(full_page()).text
    plan = outlook().plan
    tables = (memory(plan), gains(outlook()))
    cells = [cell for table in tables for row in table.rows for cell in row]
    for words in (*cells, "twice the bus", f"{plan.tokens_per_second:,.0f}", without_gain(outlook())):
        assert words in text


def test_hostile_names_are_escaped() -> None:
    reader = read(full_page(HOSTILE))
    assert reader.count["script"] == 2
    assert reader.count["img"] == 0
    assert HOSTILE in reader.text
    assert json.loads(reader.scripts[0])["model"]["name"] == HOSTILE
    assert {name for _, name, _ in reader.attributes if name.startswith("on")} == set()


NODE = """
const calls = [], told = {}, on = {};
const pen = new Proxy({}, { get: (_, name) => (...given) => calls.push([name, ...given]), set: () => true });
const canvas = { clientWidth: 1084, style: {}, dataset: { source: "plan" }, getContext: () => pen,
  setPointerCapture: () => {}, addEventListener: (name, act) => { on[name] = act; } };
const text = require("fs").readFileSync(0, "utf8");
const [data, script] = JSON.parse(text);
globalThis.document = { body: {},
  getElementById: id => ({ plan: { textContent: data }, time: canvas, op: told }[id]) };
globalThis.window = { devicePixelRatio: 2, addEventListener: () => {} };
globalThis.getComputedStyle = () => ({ color: "#000" });
const boxes = () => calls.filter(([name]) => name === "fillRect").length;
const began = performance.now();
new Function(script)();
const ticks = calls.filter(([name]) => name === "fillText").map(([, text]) => text).filter(text => /[0-9]/.test(text));
const first = boxes(), { timeline } = JSON.parse(data);
const turn = deltaY => on.wheel({ preventDefault() {}, deltaY, offsetX: 584 });
on.pointermove({ offsetX: 84, offsetY: 5 });
const hover = told.textContent;
calls.length = 0; for (let k = 0; k < 30; k++) turn(-1);
calls.length = 0; turn(-1); const zoomed = boxes();
calls.length = 0; on.keydown({ key: "0", preventDefault() {} }); const back = boxes();
calls.length = 0; on.pointerdown({ offsetX: 500, pointerId: 1 }); on.pointermove({ offsetX: 400, pointerId: 1 });
const drawn = calls.filter(([name]) => name === "fillRect");
calls.length = 0; on.pointermove({ offsetX: 500, pointerId: 1 }); on.keydown({ key: "0", preventDefault() {} });
on.pointerdown({ offsetX: 400, pointerId: 2 }); calls.length = 0; on.pointermove({ offsetX: 84, pointerId: 2 });
const pinched = boxes(); on.pointerup({ pointerId: 1 }); on.pointerup({ pointerId: 2 });
calls.length = 0; on.keydown({ key: "0", preventDefault() {} });
const widest = calls.filter(([name]) => name === "fillRect").sort((one, other) => other[3] - one[3])[0];
on.pointerdown({ offsetX: widest[1] + widest[3] / 2, offsetY: widest[2] + 1, pointerId: 3 });
const touched = told.textContent;
const edges = drawn.every(([, left, , wide]) => left >= 84 && left + wide <= 1085);
console.log(JSON.stringify({ first, zoomed, back, hover, edges, ticks, pinched, touched, ops: timeline.ops.length,
  seconds: (performance.now() - began) / 1000 }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
def test_the_timeline_works_with_ten_thousand_ops(tmp_path: Path) -> None:
    small = outlook()
    data, script = read(render_page(small, [])).scripts
    content = json.loads(data)
    few = content["timeline"]
    while len(few["ops"]) < 10_000:  # the step once more behind itself
        end = few["seconds"]
        few["ops"] += [[*row[:6], row[6] + end, row[7] + end] for row in few["ops"]]
        few["seconds"] = 2 * end
    (tmp_path / "run.js").write_text(NODE)
    done = subprocess.run(
        ["node", str(tmp_path / "run.js")],
        input=json.dumps([json.dumps(content), script]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    lanes = len(few["streams"])
    assert found["ops"] >= 10_000
    assert 50 < found["first"] == found["back"] <= 1001 * lanes  # a box for each pixel of a lane at most
    assert 0 < found["zoomed"] < found["first"]
    assert 0 < found["pinched"] < found["first"], "two fingers that part"
    assert found["edges"]
    assert 4 <= len(found["ticks"]) == len(set(found["ticks"])) <= 12
    assert all(re.fullmatch(r"0|[\d.]{1,4} (s|ms|us)", each) for each in found["ticks"]), "round numbers"
    first = min((row for row in few["ops"] if row[1] == 0), key=lambda row: row[6])
    assert found["hover"].startswith(few["kinds"][first[0]]["name"]) or found["hover"] == "\u00a0"
    assert re.fullmatch(r"[A-Z]+ u\d+.* written, .* from .*", found["touched"]), "an op under a finger"
    assert found["seconds"] < 5
