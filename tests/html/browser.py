"""A page as a real browser shows it: what it logs, and whether it is wider than its window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
"""Else it looks for updates of its own."""
FRAME = """<!doctype html><body style="margin:0"><iframe id="page" style="border:0;width:WIDTHpx;height:3000px">
</iframe>
<pre id="seen"></pre><script>
const frame = document.getElementById("page"), problems = [];
frame.addEventListener("load", () => setTimeout(() => {
  const page = frame.contentDocument, root = page.documentElement;
  ACT
  setTimeout(() => {
  const wide = [...page.querySelectorAll("main *")].filter(each => !each.closest(".wide")
    && !each.parentElement.closest(".main-svg")  // whose contents are cut at its edge
    && each.getBoundingClientRect().right > WIDTH + 1).map(each => each.tagName + "." + each.getAttribute("class"));
  const words = [...page.querySelectorAll(".hoverlayer text")].map(each => each.textContent);
  document.getElementById("seen").textContent = JSON.stringify({
    problems: frame.contentWindow.problems, overflow: root.scrollWidth - WIDTH, wide: wide.slice(0, 5), words,
    lowest: Math.min(...[...page.querySelectorAll(".nsewdrag")].map(each => each.getBoundingClientRect().height)),
    charts: page.querySelectorAll(".chart .main-svg").length });
  }, 800);
}, 1500));
frame.src = "page.html";
</script></body>"""
WATCH = """<script>
window.problems = [];
window.addEventListener("error", event => problems.push(String(event.message)));
document.addEventListener("securitypolicyviolation", event => problems.push("forbidden: " + event.violatedDirective));
for (const name of ["error", "warn"]) console[name] = (...words) => problems.push(words.join(" "));
</script>"""


def seen(page: str, folder: Path, *, width: int, act: str = "") -> dict[str, Any]:
    """What a window of `width` pixels shows of a page: `problems`, `overflow` in pixels, elements that are too `wide`,
    the `words` under the pointer, the number of `charts` and the height of the `lowest`. act: JavaScript that runs
    first, with `page` and `frame`."""
    assert BROWSER is not None
    (folder / "page.html").write_text(page.replace('<meta name="viewport"', WATCH + '<meta name="viewport"', 1))
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)).replace("ACT", act))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", *QUIET]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000", "--window-size=1300,3000"]
    done = subprocess.run(
        [*command, "--dump-dom", f"file://{folder / 'frame.html'}"], capture_output=True, text=True, timeout=240
    )
    match = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout)
    assert match, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(unescape(match[1]))
    return found
