"""The model card of an exported folder: what it is, how to load it, and the facts that the caller knows.

It states nothing that was not measured or configured, and says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- megatrain
---

# {title}

{summary} Exported by MegaTrain.

## How to load it

```python
{loading}
```
{facts}
## What this card does not say

It was written by a program. Purpose, licence, origin of the data, evaluation and limits are for whoever publishes the
model to add.
"""


def model_card(title: str, summary: str, classes: Mapping[str, str], arguments: str, facts: Mapping[str, str]) -> str:
    """The text of README.md.

    summary: one sentence on what the model is. classes: variable -> the class of transformers that loads it.
    arguments: what `from_pretrained` takes after the folder, with a leading comma. facts: rows of the table of
    training facts, none if empty.
    """
    loading = [f"from transformers import {', '.join(classes.values())}", ""]
    loading += [
        f'{variable} = {kind}.from_pretrained("path/to/this/folder"{arguments})' for variable, kind in classes.items()
    ]
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
    table = "\n".join(["", "## Training", "", "| | |", "|---|---|", *rows, ""]) if rows else ""
    return _CARD.format(title=title, summary=summary, loading="\n".join(loading), facts=table)


def _cell(text: str) -> str:
    """Text that cannot break out of its cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")
