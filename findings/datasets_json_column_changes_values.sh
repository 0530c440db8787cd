#!/usr/bin/env bash
# A column of datasets' Json type changes the values that it holds: 0.3 becomes 0.30000000000000004, "42" becomes 42.
#
# Versions: datasets 5.2.0, pandas 3.1.1, pyarrow 26.0.1.
# Expected: the values of the file, as Python's json module reads them. `load_dataset("json")` chooses the Json type by itself
# where rows differ in their keys or types, for example for the arguments of tool calls in chats.
# Seen: values are written and read with the ujson of pandas. Decimals come back as a neighbouring float, with a tail of
# digits in their text; numbers are cut to ten decimals; and a text that is JSON by itself comes back parsed, so that "42"
# is a number, "1e3" is 1000.0 and "null" is None. None of it is told.
# Cost: a chat template writes what it is given, so a model learns to call a tool with 0.30000000000000004, with 42 for "42" and
# without the argument that was "null". Of the prices from 0.01 to 99.99, 50 change.
# MegaTrain reads JSON files itself, and the stored text of such columns with Python's json, so all readers give the same ids.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

import datasets

def through(values):
    Path("rows.jsonl").write_text("".join(json.dumps({"x": value}) + "\n" for value in values))
    rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
    return rows["x"][:], rows.features["x"]

expected = [
    ([{"price": 0.3}, {"other": 0.7}], [{"price": 0.30000000000000004}, {"other": 0.7000000000000001}]),
    ([{"a": "42"}, {"b": "x"}], [{"a": "42"}, {"b": "x"}]),
    (["42", 7], [42, 7]),
    (["1e3", 7], [1000.0, 7]),
    (["null", 7], [None, 7]),
]
for given, changed in expected:
    seen, kind = through(given)
    print(f"in the file {given}, in the data set {seen}, of type {kind}")
    assert seen == changed, f"this has changed: {given} is read as {seen}"

kept = datasets.Dataset.from_list([{"x": {"a": 3.141592653589793}}, {"x": {"b": 1}}], on_mixed_types="use_json")["x"][0]
print("given to from_list 3.141592653589793, in the data set", kept["a"])
assert kept["a"] == 3.1415926536, f"this has changed: {kept}"

prices = [cent / 100 for cent in range(1, 10000)]
seen, _ = through([{"a": price} if i % 2 else {"b": price} for i, price in enumerate(prices)])
changed = sum(price not in row.values() for price, row in zip(prices, seen))
print(f"of {len(prices)} prices with two decimals, {changed} have another value")
assert changed, "this has changed: prices keep their values"
PYTHON
