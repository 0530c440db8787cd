#!/usr/bin/env bash
# load_dataset("csv") moves every cell one column to the left where rows end with a separator and the header does not.
#
# Versions: datasets 5.2.0, pandas 3.1.1.
# Expected: an error, as for other rows of a wrong length, or an unnamed last column, which is empty.
# Seen: the first column becomes an index, `instruction` holds the answers, `output` is empty in every row, and there is a column
# __index_level_0__ with the instructions. No warning. Spreadsheets and many database exports end rows in this way.
# Cost: a data set of instructions trains on answers as questions, or on nothing.
# MegaTrain refuses a row that has more cells than its header, by file and line.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile datasets==5.2.0 pandas==3.1.1

cd "$work"
cat > seen.py <<'PYTHON'
from pathlib import Path

from datasets import load_dataset

Path("rows.csv").write_text("instruction,output\nWhat is 1 + 1?,two,\nName a colour.,red,\n")
rows = load_dataset("csv", data_files="rows.csv", split="train", cache_dir="cache")
print("columns:", ", ".join(rows.column_names))
for row in rows:
    print(row)
assert rows["instruction"][:] == ["two", "red"], "this has changed"
assert rows["output"][:] == [None, None]
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python seen.py
