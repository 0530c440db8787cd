#!/usr/bin/env bash
# Dataset.map takes the columns of its result from the first row of each process, and drops without an error what other rows add.
#
# Versions: datasets 5.2.0, pyarrow 26.0.1.
# Expected: a function that adds a field to some rows only (tools, a reason, an image, a weight) gives a column with None in the others, as keys that
# are missing in a JSON Lines file do; or an error, as there is where the first row has the field and another one lacks it. A streamed data set keeps it.
# Seen: if the first row lacks the field, it is gone from all rows. With `num_proc` each process looks at its own first row: if one of them has the field,
# the column exists, and reads None for all rows of those processes whose first row lacks it. If `features` names the column, it is None in all
# rows. `from_generator` and `from_list` drop the field, too. Nothing is said. (From another group of `writer_batch_size`, 1,000
# rows by default, than the first one's, it is a KeyError.)
# Cost: chats are trained without their tools, weights or reasons are missing for a part of the rows, and which part follows from the order of rows
# and the number of processes. None is also what a row without the field has, so counting does not tell.
# MegaTrain reads each row with its own fields.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1

cd "$work"
cat > seen.py <<'PYTHON'
import datasets
from datasets import Dataset, Features, IterableDataset, Value

ROWS = 8
WITHOUT = {0, 4}
WANTED = [None if row in WITHOUT else f"tool {row}" for row in range(ROWS)]


def with_tools(row):
    return {} if row["number"] in WITHOUT else {"tools": f"tool {row['number']}"}


def rows():
    for number in range(ROWS):
        yield {"number": number} | with_tools({"number": number})


def tools_of(made):
    """The column as it is, or what takes its place."""
    try:
        return [row.get("tools", "no column") for row in made()]
    except KeyError as error:
        return f"KeyError: {error}"


def main():
    datasets.disable_progress_bars()
    plain = Dataset.from_dict({"number": list(range(ROWS))})
    declared = Features(number=Value("int64"), tools=Value("string"))
    ways = {
        "streamed": lambda: plain.to_iterable_dataset().map(with_tools),
        "map": lambda: plain.map(with_tools),
        "map, writer_batch_size=1": lambda: plain.map(with_tools, writer_batch_size=1),
        "map, from row 1": lambda: plain.select(range(1, ROWS)).map(with_tools),
        "map, num_proc=2": lambda: plain.map(with_tools, num_proc=2),
        "map, num_proc=4": lambda: plain.map(with_tools, num_proc=4),
        "map, features": lambda: plain.map(with_tools, features=declared),
        "from_generator": lambda: Dataset.from_generator(rows),
        "from_list": lambda: Dataset.from_list(list(rows())),
    }
    seen = {name: tools_of(made) for name, made in ways.items()}
    for name, tools in seen.items():
        print(f"{name}: {tools}")
    lost = ["no column"] * ROWS
    expected = {name: lost for name in ("map", "map, num_proc=2", "from_generator", "from_list")} | {
        "streamed": [tool or "no column" for tool in WANTED],
        "map, writer_batch_size=1": "KeyError: 'tools'",
        "map, from row 1": "KeyError: 'tools'",
        "map, num_proc=4": [tool if row in (2, 3, 6, 7) else None for row, tool in enumerate(WANTED)],
        "map, features": [None] * ROWS,
    }
    assert seen == expected, "this has changed"


if __name__ == "__main__":
    main()
PYTHON
HF_HOME="$work" HF_HUB_OFFLINE=1 venv/bin/python seen.py
