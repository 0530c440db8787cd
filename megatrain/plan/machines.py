"""Reads and writes hardware files, and lists the described machines of the package (`machines.json`).

Hardware files are JSON, and each key says its unit. Files are not trusted: missing and unknown keys and impossible
values are refused by name. The library keeps the peak of a datasheet and the rate that is assumed to be achieved in
separate keys, and names the source of each figure. `megatrain.commands.probe` measures machines.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, astuple, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from megatrain.errors import PlanError
from megatrain.spec import Hardware
from megatrain.spec.hardware import AttentionRate, Bandwidth, Count, ElementwiseRate, ProductRate
from megatrain.spec.validate_fields import checked
from megatrain.system.paths import read_text, usable_path, written_or_refused

_LIBRARY = "machines.json"
_SYSTEM_NBYTES = 4 << 30
"""Installed memory that the system and other programs use, on machines of the library; assumed."""
_DEVICE_NAMES = "device_names"
"""Key used only in the library: the names that drivers give the device."""
_LIKE = "like"
"""Key used only in the library: the machine from which an entry inherits figures and sources that it does not give."""


_NAMED_APART = {
    "flops": "bf16_flops_per_second",
    "peak_flops": "bf16_peak_flops_per_second",
    "flops_fp32": "fp32_flops_per_second",
    "peak_flops_fp32": "fp32_peak_flops_per_second",
    "device_bandwidth": "device_copy_bytes_per_second",
    "host_bandwidth": "optimizer_bytes_per_second",
    "optimizer_bandwidth": "optimizer_by_threads",
}
"""Field of `Hardware` -> its key in a file, where `_named_in_files` says another."""
_OF_RANKS = ("slots_in_host", "sharing_ranks")
"""Fields that a file does not have: they say how ranks share a machine."""


def _named_in_files(field: str) -> str:
    """The name of a field with its unit, which keys and columns of a file have."""
    for ending, unit in (("nbytes", "bytes"), ("bandwidth", "bytes_per_second"), ("flops", "flops_per_second")):
        if field.endswith(ending):
            return field.removesuffix(ending) + unit
    return field


_KEYS = {
    field.name: _NAMED_APART.get(field.name) or _named_in_files(field.name)
    for field in fields(Hardware)
    if field.name not in _OF_RANKS
}
"""Field of `Hardware` -> its key in a file."""
_COLUMNS = {
    row_type: {column.name: _named_in_files(column.name) for column in fields(row_type)}
    for row_type in (ProductRate, AttentionRate, ElementwiseRate)
}
_TABLES: dict[str, tuple[Any, dict[str, str]]] = {
    "products": (ProductRate, _COLUMNS[ProductRate]),
    "attention": (AttentionRate, _COLUMNS[AttentionRate]),
    "elementwise": (ElementwiseRate, _COLUMNS[ElementwiseRate]),
    "optimizer_bandwidth": (None, {"threads": "threads", "rate": "bytes_per_second"}),
}
"""Field with rows -> their type, if they are no tuples, and their fields -> columns of a file."""


def machine_names() -> tuple[str, ...]:
    """The names of the library's machines."""
    return tuple(_library())


def machine(name: str) -> Hardware:
    """A machine of the library. Case, spaces and dashes are ignored.

    Raises `PlanError` with the nearest names for an unknown one.
    """
    if (found := _named(name)) is None:
        raise PlanError(f"unknown machine {name!r}", where="hardware", fix=_nearest_machines(_normalized(name)))
    return found


def machine_of_device(device_name: str) -> Hardware | None:
    """The machine of the library with a device of this name, as its driver reports it, or `None`."""
    return next((described for names, described in _library().values() if device_name in names), None)


def load_hardware(source: str | Path) -> Hardware:
    """A machine of the library by its name, or from a hardware file by its path.

    Raises `PlanError` for an unknown name, an unreadable file and an invalid value in it.
    """
    path = usable_path(source, where="hardware", error=PlanError)
    may_be_a_name = isinstance(source, str) and os.sep not in source and path.suffix != ".json"
    if may_be_a_name and (_named(str(source)) is not None or not path.exists()):
        return machine(str(source))
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        what = f"cannot be read ({getattr(error, 'strerror', None) or 'not text'})"
        raise PlanError(what, where=str(path), fix="run `megatrain probe`, or name a described machine") from error
    return _read(_parsed(text, str(path)), str(path))


def save_hardware(hardware: Hardware, path: Path) -> None:
    """Write a hardware file. `load_hardware` reads the same machine from it.

    Raises `PlanError` for a value that `load_hardware` would refuse, and if the file cannot be written.
    """
    content = _content(hardware)
    _read(content, str(path))
    fix = "choose a file in a folder that you may write to"
    with written_or_refused(path, PlanError, fix, makes_folder=True) as draft:
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# Reading -----------------------------------------------------------------------------------------------------------


def _read(content: Any, where: str) -> Hardware:
    if not isinstance(content, dict):
        raise PlanError("is not a JSON object", where=where, fix="see `megatrain probe`")
    _refuse_unknown(content, _KEYS.values(), where)
    needed = [_KEYS[field.name] for field in fields(Hardware) if field.default is MISSING]
    if missing := [key for key in needed if key not in content]:
        raise _missing(missing, f"{where}: ", "run `megatrain probe`, or add")
    if not isinstance(content["name"], str) or not content["name"].strip() or not content["name"].isprintable():
        raise PlanError(f"{content['name']!r} is not a name", where=f"{where}: name", fix="give one line of text")
    values: dict[str, Any] = {"sources": _sources(content.get("sources", {}), f"{where}: sources")}
    kinds = get_type_hints(Hardware, include_extras=True)
    for field, key in _KEYS.items():
        if key not in content or field == "sources":
            continue
        if field in _TABLES:
            values[field] = tuple(_rows(content[key], field, f"{where}: {key}"))
        else:
            values[field] = checked(content[key], kinds[field], PlanError, f"{where}: {key}")
    return _consistent(Hardware(**values), where)


def _rows(rows: Any, field: str, where: str) -> Iterator[Any]:
    """The rows of one table."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PlanError("is not a list of JSON objects", where=where, fix="see `megatrain probe`")
    row_type, columns = _TABLES[field]
    kinds = {"threads": Count, "rate": Bandwidth} if row_type is None else get_type_hints(row_type, include_extras=True)
    optional = [] if row_type is None else [each.name for each in fields(row_type) if each.default is not MISSING]
    for index, row in enumerate(rows):
        place = f"{where}[{index}]"
        _refuse_unknown(row, columns.values(), place)
        if missing := [key for name, key in columns.items() if key not in row and name not in optional]:
            raise _missing(missing, f"{place}.", "leave out the row, or add")
        given = {
            name: checked(row[key], kinds[name], PlanError, f"{place}.{key}")
            for name, key in columns.items()
            if key in row
        }
        yield tuple(given.values()) if row_type is None else row_type(**given)


def _sources(notes: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(notes, dict):
        raise PlanError("is not a JSON object of texts", where=where, fix="see `megatrain probe`")
    known = {key: field for field, key in _KEYS.items() if field != "sources"}
    _refuse_unknown(notes, known, where)
    if wrong := [key for key, note in notes.items() if not isinstance(note, str)]:
        raise PlanError(f"{notes[wrong[0]]!r} is not a text", where=f"{where}.{wrong[0]}", fix="give a text")
    return tuple((known[key], note) for key, note in notes.items())


def _consistent(hardware: Hardware, where: str) -> Hardware:
    """The machine. Raises `PlanError` if two of its values contradict each other."""
    for peak, rate, key in (
        (hardware.peak_flops, hardware.flops, "bf16_flops_per_second"),
        (hardware.peak_flops_fp32, hardware.flops_fp32, "fp32_flops_per_second"),
    ):
        if (
            peak is not None and rate is not None and rate > 1.1 * peak
        ):  # a boost clock may exceed a datasheet's peak a little
            raise PlanError(
                f"{rate:g} is above the peak of {peak:g}", where=f"{where}: {key}", fix="correct one of the two"
            )
    threads = [count for count, _ in hardware.optimizer_bandwidth]
    if threads != sorted(set(threads)):
        what = f"thread counts {threads} do not ascend"
        raise PlanError(what, where=f"{where}: optimizer_by_threads", fix="sort them")
    return hardware


def _missing(keys: list[str], where: str, fix: str) -> PlanError:
    verb, them = ("is", "it") if len(keys) == 1 else ("are", "them")
    return PlanError(f"{verb} missing", where=where + ", ".join(keys), fix=f"{fix} {them}")


def _refuse_unknown(content: Mapping[str, Any], known: Any, where: str) -> None:
    for key in content:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            fix = f"did you mean {nearest[0]!r}?" if nearest else f"the keys are {', '.join(known)}"
            raise PlanError(f"unknown key {key!r}", where=where, fix=fix)


def _number(text: str) -> float | int:
    """A number with a point or an exponent: whole ones, such as 24e9, may be numbers of bytes."""
    return int(number) if (number := float(text)).is_integer() else number


def _parsed(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            twice = next(key for key, _ in pairs if [name for name, _ in pairs].count(key) > 1)
            raise PlanError(f"key {twice!r} appears twice", where=where, fix="remove one of them")
        return content

    try:
        return json.loads(text, object_pairs_hook=unique, parse_float=_number)
    except (ValueError, RecursionError) as error:
        what = f"is not JSON ({error})" if isinstance(error, ValueError) else "is not JSON (nested too deeply)"
        raise PlanError(what, where=where, fix="write it again with `megatrain probe`") from error


# Writing and the library -------------------------------------------------------------------------------------------


def _content(hardware: Hardware) -> dict[str, Any]:
    """The content of a hardware file. Unknown rates, and flags that are off, are left out."""
    content: dict[str, Any] = {}
    for field, key in _KEYS.items():
        value = getattr(hardware, field)
        if field in _TABLES:
            row_type, columns = _TABLES[field]
            value = [zip(columns.values(), row if row_type is None else astuple(row), strict=True) for row in value]
            value = [dict(row) for row in value]
        if value is not None and value is not False and value != [] and field != "sources":
            content[key] = value
    content["sources"] = {_KEYS.get(field, field): note for field, note in hardware.sources}
    return content


@cache
def _library() -> dict[str, tuple[tuple[str, ...], Hardware]]:
    """Name -> (names that drivers give the device, machine)."""
    entries = _parsed(resources.files("megatrain.plan").joinpath(_LIBRARY).read_text(encoding="utf-8"), _LIBRARY)
    machines = {}
    for name, entry in entries.items():
        if like := entry.pop(_LIKE, None):
            inherited = {key: value for key, value in entries[like].items() if key != _DEVICE_NAMES}
            entry = {**inherited, **entry, "sources": {**inherited["sources"], **entry["sources"]}}
        devices = tuple(entry.pop(_DEVICE_NAMES, ()))
        installed = _read(entry, f"{_LIBRARY}: {name}")
        machines[name] = devices, replace(installed, host_nbytes=installed.host_nbytes - _SYSTEM_NBYTES)
    return machines


def _named(name: str) -> Hardware | None:
    return next((found for key, (_, found) in _library().items() if _normalized(key) == _normalized(name)), None)


def _normalized(name: str) -> str:
    return "".join(each for each in name.lower() if each.isalnum())


def _nearest_machines(name: str) -> str:
    names = {_normalized(each): each for each in machine_names()}
    within = [each for each in names if name and (name in each or each in name)]
    if len(name) > 3:  # `gb10`, `rtx4070`, `xeon`: what the machine is built of
        known = ((key, " ".join((*devices, there.name))) for key, (devices, there) in _library().items())
        within += [_normalized(key) for key, text in known if name in _normalized(text)]
    nearest = [*within, *difflib.get_close_matches(name, names, n=3, cutoff=0.5)]
    if nearest:
        return f"did you mean {' or '.join([names[each] for each in dict.fromkeys(nearest)][:3])}?"
    return f"the machines are {', '.join(names.values())}; a path ends in .json"
