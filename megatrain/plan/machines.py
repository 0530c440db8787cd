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
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from megatrain.errors import PlanError
from megatrain.spec import WEIGHT_NBYTES, Hardware
from megatrain.spec.hardware import PRODUCT_KINDS, AttentionRate, DiskRate, ElementwiseRate, LinkRoute, ProductRate
from megatrain.system.paths import read_text, usable_path, written_whole

_LIBRARY = "machines.json"
_SYSTEM_NBYTES = 4 << 30
"""Installed memory that the system and other programs use, on machines of the library; assumed."""
_DEVICE_NAMES = "device_names"
"""Key used only in the library: the names that drivers give the device."""
_LIKE = "like"
"""Key used only in the library: the machine from which an entry inherits figures and sources that it does not give."""


@dataclass(frozen=True, slots=True)
class _Number:
    """A range of accepted numbers, both ends included, and the one that is meant if there is none."""

    least: float
    most: float
    whole: bool = False
    default: int | None = None

    def read(self, value: Any, where: str) -> float | int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlanError(f"{value!r:.40} is not a number", where=where, fix=self._advice())
        if not self.least <= value <= self.most:  # also NaN
            raise PlanError(f"{value!s:.24} is out of range", where=where, fix=self._advice())
        if self.whole and value != int(value):
            raise PlanError(f"{value} is not a whole number", where=where, fix=self._advice())
        return int(value) if self.whole else float(value)

    def _advice(self) -> str:
        return f"give a {'whole ' if self.whole else ''}number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class _Word:
    """A choice of accepted words, and the one that is meant if there is none."""

    words: tuple[str, ...]
    default: str | None = None

    def read(self, value: Any, where: str) -> str:
        if value not in self.words:
            fix = f"use {', '.join(self.words[:-1])} or {self.words[-1]}"
            raise PlanError(f"{value!r:.40} is not valid", where=where, fix=fix)
        return str(value)


_CAPACITY = _Number(2**20, 1e18, whole=True)
_BANDWIDTH = _Number(1e5, 1e15)
_FLOPS = _Number(1e6, 1e18)
_COUNT = _Number(1, 2**24, whole=True)
_BLOCK = _Number(512, 2**30, whole=True)
_DEPTH = _Number(1, 4096, whole=True)
_SECONDS = _Number(1e-9, 1.0)

_NUMBERS: dict[str, tuple[str, _Number]] = {  # key in a file -> field of Hardware, accepted numbers
    "device_bytes": ("device_nbytes", _CAPACITY),
    "host_bytes": ("host_nbytes", _CAPACITY),
    "pinnable_bytes": ("pinnable_nbytes", _Number(0, 1e18, whole=True)),
    "bf16_flops_per_second": ("flops", _FLOPS),
    "bf16_peak_flops_per_second": ("peak_flops", _FLOPS),
    "fp32_flops_per_second": ("flops_fp32", _FLOPS),
    "fp32_peak_flops_per_second": ("peak_flops_fp32", _FLOPS),
    "launch_seconds": ("launch_seconds", _SECONDS),
    "device_copy_bytes_per_second": ("device_bandwidth", _BANDWIDTH),
    "elementwise_bytes_per_second": ("elementwise_bandwidth", _BANDWIDTH),
    "fresh_bytes_per_second": ("fresh_bandwidth", _BANDWIDTH),
    "fetch_bytes_per_second": ("fetch_bandwidth", _BANDWIDTH),
    "grad_bytes_per_second": ("grad_bandwidth", _BANDWIDTH),
    "duplex_fetch_bytes_per_second": ("duplex_fetch_bandwidth", _BANDWIDTH),
    "duplex_grad_bytes_per_second": ("duplex_grad_bandwidth", _BANDWIDTH),
    "pageable_fetch_bytes_per_second": ("pageable_fetch_bandwidth", _BANDWIDTH),
    "pageable_grad_bytes_per_second": ("pageable_grad_bandwidth", _BANDWIDTH),
    "optimizer_bytes_per_second": ("host_bandwidth", _BANDWIDTH),
    "host_dram_bytes_per_second": ("host_dram_bandwidth", _BANDWIDTH),
    "norm_bytes_per_second": ("norm_bandwidth", _BANDWIDTH),
    "host_copy_bytes_per_second": ("host_copy_bandwidth", _BANDWIDTH),
    "disk_bytes": ("disk_nbytes", _Number(0, 1e18, whole=True)),
    "disk_read_bytes_per_second": ("disk_read_bandwidth", _BANDWIDTH),
    "disk_write_bytes_per_second": ("disk_write_bandwidth", _BANDWIDTH),
    "disk_duplex_read_bytes_per_second": ("disk_duplex_read_bandwidth", _BANDWIDTH),
    "disk_duplex_write_bytes_per_second": ("disk_duplex_write_bandwidth", _BANDWIDTH),
    "disk_block_bytes": ("disk_block_nbytes", _BLOCK),
    "disk_depth": ("disk_depth", _DEPTH),
    "disk_endurance_bytes": ("disk_endurance_nbytes", _CAPACITY),
    "devices": ("devices", _DEPTH),
    "shared_bus_bytes_per_second": ("shared_bus_bandwidth", _BANDWIDTH),
    "link_bytes_per_second": ("link_bandwidth", _BANDWIDTH),
    "link_seconds": ("link_seconds", _SECONDS),
    "node_bytes_per_second": ("node_bandwidth", _BANDWIDTH),
}
_PRECISION = _Word(tuple(WEIGHT_NBYTES))
_TABLES: dict[str, tuple[str, Any, dict[str, _Number | _Word]]] = {  # key -> field, type of a row, its columns in order
    "products": (
        "products",
        ProductRate,
        {
            "precision": _PRECISION,
            "m": _COUNT,
            "k": _COUNT,
            "n": _COUNT,
            "flops_per_second": _FLOPS,
            "kind": _Word(PRODUCT_KINDS, default="output"),
        },
    ),
    "attention": (
        "attention",
        AttentionRate,
        {
            "precision": _PRECISION,
            "length": _COUNT,
            "head_size": _COUNT,
            "forward_flops_per_second": _FLOPS,
            "backward_flops_per_second": _FLOPS,
        },
    ),
    "elementwise": (
        "elementwise",
        ElementwiseRate,
        {
            "precision": _PRECISION,
            "forward_bytes_per_second": _BANDWIDTH,
            "backward_bytes_per_second": _BANDWIDTH,
            "bytes": _Number(1, 1e18, whole=True, default=1),
        },
    ),
    "optimizer_by_threads": (
        "optimizer_bandwidth",
        lambda *row: row,
        {"threads": _COUNT, "bytes_per_second": _BANDWIDTH},
    ),
    "disk_by_block_and_depth": (
        "disk_rates",
        DiskRate,
        {
            "block_bytes": _BLOCK,
            "depth": _DEPTH,
            "read_bytes_per_second": _BANDWIDTH,
            "write_bytes_per_second": _BANDWIDTH,
        },
    ),
}
_LINK_ROUTE = _Word(get_args(LinkRoute), default="direct")
_FLAGS = ("shares_memory", "divided_memory")
_OTHER_KEYS = ("name", *_FLAGS, "link_route", "sources")
_KEYS = (*_OTHER_KEYS, *_NUMBERS, *_TABLES)
_OBSOLETE_KEYS = ("watts",)
"""Keys that earlier versions wrote. They are ignored."""


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as draft:
            draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise PlanError(what, where=str(path), fix="choose a file in a folder that you may write to") from error


# Reading -----------------------------------------------------------------------------------------------------------


def _read(content: Any, where: str) -> Hardware:
    if not isinstance(content, dict):
        raise PlanError("is not a JSON object", where=where, fix="see `megatrain probe`")
    content = {key: value for key, value in content.items() if key not in _OBSOLETE_KEYS}
    _refuse_unknown(content, _KEYS, where)
    without_default = {field.name for field in fields(Hardware) if field.default is MISSING}
    needed = ["name", *(key for key, (field, _) in _NUMBERS.items() if field in without_default)]
    if missing := [key for key in needed if key not in content]:
        raise _missing(missing, f"{where}: ", "run `megatrain probe`, or add")
    if not isinstance(content["name"], str) or not content["name"].strip() or not content["name"].isprintable():
        raise PlanError(f"{content['name']!r} is not a name", where=f"{where}: name", fix="give one line of text")
    flags = {key: content[key] for key in _FLAGS if key in content}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise PlanError(f"{value!r:.40} is not valid", where=f"{where}: {key}", fix="use true or false")
    route = _LINK_ROUTE.read(content.get("link_route", _LINK_ROUTE.default), f"{where}: link_route")
    values: dict[str, Any] = {"name": content["name"], "link_route": route, **flags}
    for key, (field, number) in _NUMBERS.items():
        if key in content:
            values[field] = number.read(content[key], f"{where}: {key}")
    for key, (field, _, _) in _TABLES.items():
        values[field] = tuple(_rows(content.get(key, []), key, f"{where}: {key}"))
    values["sources"] = _sources(content.get("sources", {}), f"{where}: sources")
    return _consistent(Hardware(**values), where)


def _rows(rows: Any, key: str, where: str) -> Iterator[Any]:
    """The rows of one table."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PlanError("is not a list of JSON objects", where=where, fix="see `megatrain probe`")
    _, row_type, columns = _TABLES[key]
    defaults = {name: kind.default for name, kind in columns.items() if kind.default is not None}
    for index, row in enumerate(rows):
        place = f"{where}[{index}]"
        _refuse_unknown(row, columns, place)
        row = {**defaults, **row}
        if missing := [name for name in columns if name not in row]:
            raise _missing(missing, f"{place}.", "leave out the row, or add")
        yield row_type(*(kind.read(row[name], f"{place}.{name}") for name, kind in columns.items()))


def _sources(notes: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(notes, dict):
        raise PlanError("is not a JSON object of texts", where=where, fix="see `megatrain probe`")
    known = _keys_with_sources()
    notes = {key: note for key, note in notes.items() if key not in _OBSOLETE_KEYS}
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


def _parsed(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            twice = next(key for key, _ in pairs if [name for name, _ in pairs].count(key) > 1)
            raise PlanError(f"key {twice!r} appears twice", where=where, fix="remove one of them")
        return content

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        what = f"is not JSON ({error})" if isinstance(error, ValueError) else "is not JSON (nested too deeply)"
        raise PlanError(what, where=where, fix="write it again with `megatrain probe`") from error


# Writing and the library -------------------------------------------------------------------------------------------


def _content(hardware: Hardware) -> dict[str, Any]:
    """The content of a hardware file. Unknown rates are left out."""
    content: dict[str, Any] = {"name": hardware.name, "shares_memory": hardware.shares_memory}
    content |= {"divided_memory": True} if hardware.divided_memory else {}
    content["link_route"] = hardware.link_route
    for key, (field, _) in _NUMBERS.items():
        if (value := getattr(hardware, field)) is not None:
            content[key] = value
    for key, (field, _, columns) in _TABLES.items():
        if rows := [dict(zip(columns, _values(row), strict=True)) for row in getattr(hardware, field)]:
            content[key] = rows
    keys = {field: key for key, field in _keys_with_sources().items()}
    content["sources"] = {keys.get(field, field): note for field, note in hardware.sources}
    return content


def _values(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else tuple(getattr(row, name) for name in row.__slots__)


def _keys_with_sources() -> dict[str, str]:
    """Key in a file -> field of `Hardware`, for all that may have a source."""
    others = {key: key for key in ("name", *_FLAGS, "link_route")}
    tables = {key: field for key, (field, _, _) in _TABLES.items()}
    return others | {key: field for key, (field, _) in _NUMBERS.items()} | tables


@cache
def _library() -> dict[str, tuple[tuple[str, ...], Hardware]]:
    """Name -> (names that drivers give the device, machine)."""
    entries = _parsed(resources.files("megatrain.plan").joinpath(_LIBRARY).read_text(encoding="utf-8"), _LIBRARY)
    found = {}
    for name, entry in entries.items():
        if like := entry.pop(_LIKE, None):
            inherited = {key: value for key, value in entries[like].items() if key != _DEVICE_NAMES}
            entry = {**inherited, **entry, "sources": {**inherited["sources"], **entry["sources"]}}
        devices = tuple(entry.pop(_DEVICE_NAMES, ()))
        installed = _read(entry, f"{_LIBRARY}: {name}")
        found[name] = devices, replace(installed, host_nbytes=installed.host_nbytes - _SYSTEM_NBYTES)
    return found


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
