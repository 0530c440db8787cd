"""Measures built-in models and writes what the package has of them, `plan/measured_models.zip`.

    python -m bench.measured_models [--parameters] [NAME ...]

To be run when the code that measures, or the library, gives other figures: `tests/plan/test_measured_models.py` says so
of three of them (slow). About twenty minutes on one core; with names, only those and what the file lacks are measured.
With `--parameters`, only what is known of parameters is written anew (`ParamSpec`: matrices, say), in some minutes, and
every measured byte stays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import torch

from megatrain.model import port_model
from megatrain.model.hub import known_config, known_models
from megatrain.model.ports import PortedModel
from megatrain.model.skeleton import blueprint
from megatrain.plan.measured_models import BUILT_IN, built_in
from megatrain.plan.spec_file import as_fields
from megatrain.spec import ModelSpec


def measured(name: str) -> ModelSpec:
    """A built-in model, in bfloat16."""
    return _ported(name).spec


def with_parameters(name: str) -> ModelSpec:
    """A built-in model as it is stored, with its parameters as they are found now."""
    stored, units = built_in(name), _ported(name).structure.units
    pairs = zip(units, stored.units, strict=True)
    return replace(stored, units=tuple(replace(unit, profile=old.profile) for unit, old in pairs))


def _ported(name: str) -> PortedModel:
    return port_model(blueprint(known_config(name)), torch.bfloat16)


def main(names: Sequence[str]) -> None:
    look = with_parameters if "--parameters" in names else measured
    names = [name for name in names if name != "--parameters"]
    with ZipFile(BUILT_IN) as archive:
        kept = {name: archive.read(name).decode() for name in archive.namelist() if names and name not in names}
    texts = {}
    for name in known_models():
        texts[name] = kept.get(name) or json.dumps({"model": as_fields(look(name))}, separators=(",", ":"))
        print(f"{name}: {len(texts[name]):,} characters", flush=True)
    with ZipFile(BUILT_IN, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in texts.items():
            archive.writestr(ZipInfo(name), text, ZIP_DEFLATED)  # of no date, so that equal figures are equal bytes


if __name__ == "__main__":
    main(sys.argv[1:])
