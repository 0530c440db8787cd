"""Described machines are complete, files keep every figure, and what is wrong in one is named."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import PlanError
from megatrain.plan import load_hardware, machine, machine_names, save_hardware
from megatrain.plan.machines import machine_of_device
from megatrain.spec import Hardware
from megatrain.spec.hardware import PRODUCT_KINDS, AttentionRate, ElementwiseRate, LinkRoute, ProductRate

PLAIN = Hardware("plain", 8 << 30, 32 << 30, 1e10, 1e10, 1e13, 4e10)
KEYS = {
    "device_bytes": 1e10,
    "host_bytes": 1e11,
    "fetch_bytes_per_second": 1e10,
    "grad_bytes_per_second": 1e10,
    "bf16_flops_per_second": 1e13,
    "optimizer_bytes_per_second": 4e10,
}


def file_of(folder: Path, **changes: Any) -> Path:
    """A hardware file with `changes`; a value of None takes its key out."""
    content: dict[str, Any] = {"name": "file", **KEYS} | changes
    path = folder / "here.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def test_the_machine_library_is_complete() -> None:
    servers = {"h200", "h100", "h100-pcie", "a100-pcie", "a100-sxm", "gh200", "b200", "mi300x", "l40s"}
    desks = {"rtx-3090", "rtx-4080", "rtx-4090", "rtx-5080", "rtx-5090", "rtx-pro-6000", "a6000", "laptop"}
    several = {"8x-h100", "8x-h200", "4x-gh200", "4x-rtx-4090", "8x-rtx-4090", "2x-rtx-5090", "dgx-spark"}
    assert servers | desks | several | {"cpu-desktop", "cpu-server"} == set(machine_names())


def test_multi_gpu_machines_state_their_link_and_reuse_a_device() -> None:
    for name in machine_names():
        each, sources = machine(name), dict(machine(name).sources)
        if each.devices > 1:
            of_one = machine(name.partition("-")[2])
            assert name.startswith(f"{each.devices}x-")
            assert (each.flops, each.attention, each.device_nbytes) == (
                of_one.flops,
                of_one.attention,
                of_one.device_nbytes,
            )
            assert each.link_bandwidth is not None
            assert len(sources["link_route"]) > 10
            assert each.host_nbytes >= of_one.host_nbytes
        assert each.sharing_ranks == 1


@pytest.mark.parametrize("name", machine_names())
def test_every_figure_of_a_described_machine_has_a_source(name: str) -> None:
    described = machine(name)
    sources = dict(described.sources)
    unsourced = {"name", "sources", "shares_memory"}
    for each in fields(Hardware):
        if each.name not in unsourced and getattr(described, each.name) not in (None, (), each.default):
            assert len(sources[each.name]) > 10, each.name
    assert "assumed" in sources["flops"]
    assert "assumed" not in sources["peak_flops"]
    assert described.peak_flops is not None
    assert described.peak_flops_fp32 is not None
    assert described.flops_fp32 is not None
    assert 0.4 * described.peak_flops < described.flops < described.peak_flops
    assert 0.4 * described.peak_flops_fp32 < described.flops_fp32 < described.peak_flops_fp32


def test_machine_figures_are_ordered_plausibly() -> None:
    by = {name: machine(name) for name in machine_names()}
    assert by["laptop"].flops < by["rtx-3090"].flops < by["rtx-4090"].flops < by["rtx-5090"].flops < by["h100"].flops
    assert by["h100"].flops == by["h200"].flops < by["b200"].flops
    assert by["h100"].device_nbytes < by["h200"].device_nbytes < by["b200"].device_nbytes < by["mi300x"].device_nbytes
    assert max(by.values(), key=lambda each: each.fetch_bandwidth) is by["gh200"]
    assert min(by.values(), key=lambda each: each.host_nbytes) is by["laptop"]
    assert by["a100-pcie"].fetch_bandwidth < by["h100"].fetch_bandwidth
    for each in by.values():
        assert each.host_bandwidth > each.fetch_bandwidth or each.name.startswith("NVIDIA RTX")
        assert (each.duplex_fetch_bandwidth or 0) <= each.fetch_bandwidth
        assert each.optimizer_bandwidth[-1][1] == each.host_bandwidth


def test_machines_are_found_by_any_spelling_and_driver_name() -> None:
    assert machine("RTX 4090") is machine("rtx-4090") is load_hardware("rtx4090")
    assert machine_of_device("NVIDIA GeForce RTX 4090") is machine("rtx-4090")
    assert machine_of_device("NVIDIA H100 PCIe") is machine("h100-pcie")
    assert machine_of_device("NVIDIA H100 NVL") is None


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("h20", "h200 or gh200"),
        ("a100", "did you mean a100-sxm or a100-pcie"),
        ("rtx4070", "laptop or rtx-4090"),
        ("gb10", "did you mean dgx-spark"),
        ("xeon", r"did you mean cpu-server\?"),
        ("tpu-v5", "the machines"),
    ],
)
def test_an_unknown_machine_suggests_the_nearest_name(name: str, nearest: str) -> None:
    for find in (machine, load_hardware):
        with pytest.raises(PlanError, match=f"unknown machine '{name}'; .*{nearest}") as caught:
            find(name)
        assert "\n" not in str(caught.value)


COUNTS = st.integers(1, 2**24)
BANDWIDTHS = st.floats(1e5, 1e15)
RATES = st.floats(1e6, 1e18)
NBYTES = st.integers(2**20, 10**18)
PRECISIONS = st.sampled_from(["bf16", "fp32"])
KINDS = st.sampled_from(PRODUCT_KINDS)
MACHINES = st.builds(
    Hardware,
    name=st.text(min_size=1).filter(lambda text: bool(text.strip()) and text.isprintable()),
    device_nbytes=NBYTES,
    host_nbytes=NBYTES,
    fetch_bandwidth=BANDWIDTHS,
    grad_bandwidth=BANDWIDTHS,
    flops=RATES,
    host_bandwidth=BANDWIDTHS,
    shares_memory=st.booleans(),
    divided_memory=st.booleans(),
    flops_fp32=st.none() | RATES,
    products=st.lists(st.builds(ProductRate, PRECISIONS, *[COUNTS] * 3, RATES, KINDS), max_size=3).map(tuple),
    attention=st.lists(st.builds(AttentionRate, PRECISIONS, COUNTS, COUNTS, RATES, RATES), max_size=3).map(tuple),
    elementwise=st.lists(st.builds(ElementwiseRate, PRECISIONS, BANDWIDTHS, BANDWIDTHS, NBYTES), max_size=2).map(tuple),
    fresh_bandwidth=st.none() | BANDWIDTHS,
    launch_seconds=st.none() | st.floats(1e-9, 1.0),
    optimizer_bandwidth=st.dictionaries(COUNTS, BANDWIDTHS, max_size=3).map(lambda d: tuple(sorted(d.items()))),
    disk_nbytes=st.none() | st.integers(0, 10**18),
    pinnable_nbytes=st.none() | st.just(0) | NBYTES,
    disk_endurance_nbytes=st.none() | st.integers(2**20, 10**15),
    devices=st.integers(1, 4096),
    link_bandwidth=st.none() | BANDWIDTHS,
    link_route=st.sampled_from(get_args(LinkRoute)),
    link_seconds=st.none() | st.floats(1e-9, 1.0),
    node_bandwidth=st.none() | BANDWIDTHS,
    sources=st.dictionaries(st.sampled_from(["flops", "products", "name"]), st.text()).map(lambda d: tuple(d.items())),
)


@given(MACHINES)
def test_hardware_files_round_trip(hardware: Hardware) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "machine.json"
        save_hardware(hardware, path)
        assert load_hardware(path) == load_hardware(str(path)) == hardware
        assert [each.name for each in path.parent.iterdir()] == ["machine.json"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["bf16", "name"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["precision", "m", "k", "n", "threads", "name"]), inner, max_size=3)
    ),
    max_leaves=6,
)
SOME_KEYS = st.sampled_from(
    [*KEYS, "name", "products", "optimizer_by_threads", "sources", "shares_memory", "divided_memory"]
)


@given(st.dictionaries(SOME_KEYS, ANYTHING, max_size=4))
def test_any_hardware_file_is_read_or_refused(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = file_of(Path(folder), **changes)
        with suppress(PlanError):  # any other error fails
            assert isinstance(load_hardware(path), Hardware)


def test_columns_with_defaults_may_be_left_out(tmp_path: Path) -> None:
    row = {"precision": "bf16", "m": 1, "k": 2, "n": 3, "flops_per_second": 1e9}
    assert load_hardware(file_of(tmp_path, products=[row])).products == (ProductRate("bf16", 1, 2, 3, 1e9, "output"),)
    row = {"precision": "bf16", "forward_bytes_per_second": 2e9, "backward_bytes_per_second": 1e9}
    assert load_hardware(file_of(tmp_path, elementwise=[row])).elementwise == (ElementwiseRate("bf16", 2e9, 1e9, 1),)


def test_every_hardware_key_states_its_unit(tmp_path: Path) -> None:
    save_hardware(machine("h200"), tmp_path / "h200.json")
    content = json.loads((tmp_path / "h200.json").read_text())
    units = ("_bytes", "_per_second", "_seconds", "_depth", "name", "shares_memory", "sources", "by_threads")
    units += ("devices", "link_route")
    content.pop("attention")  # a table, whose columns do
    assert [key for key in content if not key.endswith(units)] == []


@pytest.mark.parametrize("value", [0, -1, 1e19, float("nan"), float("inf"), "fast", True, [1e10], 10**40])
@pytest.mark.parametrize("key", ["device_bytes", "fetch_bytes_per_second", "bf16_flops_per_second", "launch_seconds"])
def test_absurd_figures_are_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    path = file_of(tmp_path, **{key: value})
    with pytest.raises(PlanError, match=rf"here.json: {key}: .* is not valid; use a (whole|finite) number") as caught:
        load_hardware(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"fetch_bytes_per_second": 12},
            "fetch_bytes_per_second: 12 is not valid; use a finite number, 100000 to 1e.15",
        ),
        ({"host_bytes": 3e9 + 0.5}, "host_bytes: 3000000000.5 is not valid; use a whole number"),
        ({"grad_bytes_per_second": None}, "grad_bytes_per_second: is missing"),
        ({"name": None}, "name: is missing; run `megatrain probe`, or add it"),
        (
            {"host_bytes": None, "grad_bytes_per_second": None},
            "here.json: host_bytes, grad_bytes_per_second: are missing; run `megatrain probe`, or add them",
        ),
        ({"products": [{"precision": "bf16", "m": 1}]}, r"products\[0\].k, n, flops_per_second: are missing"),
        ({"name": " "}, "name: ' ' is not a name"),
        ({"shares_memory": 1}, "shares_memory: 1 is not valid"),
        ({"divided_memory": "no"}, "divided_memory: 'no' is not valid; use true or false"),
        ({"link_route": ["bus"]}, r"link_route: .'bus'. is not valid; use direct, bus or host"),
        ({"devices": 0}, "devices: 0 is not valid"),
        ({"host_byte": 300}, "unknown key 'host_byte'; did you mean 'host_bytes'?"),
        ({"products": {}}, "products: is not a list of JSON objects"),
        (
            {"products": [{"precision": "bf16", "m": 1, "k": 1, "flops_per_second": 1e9}]},
            r"products\[0\].n: is missing",
        ),
        (
            {"products": [{"precision": "fp8", "m": 1, "k": 1, "n": 1, "flops_per_second": 1e9}]},
            r"products\[0\].precision: 'fp8' is not valid; use bf16 or fp32",
        ),
        (
            {"products": [{"precision": "bf16", "m": 1, "k": 1, "n": 1, "flops_per_second": 1e9, "kind": "inputs"}]},
            r"products\[0\].kind: 'inputs' is not valid; use output, input gradient or weight gradient",
        ),
        (
            {"optimizer_by_threads": [{"threads": 1, "bytes_per_secnd": 1e9}]},
            r"optimizer_by_threads\[0\]: unknown key 'bytes_per_secnd'; did you mean 'bytes_per_second'",
        ),
        (
            {"optimizer_by_threads": [{"threads": t, "bytes_per_second": 1e9} for t in (2, 1)]},
            "optimizer_by_threads: thread counts .2, 1. do not ascend",
        ),
        (
            {"optimizer_by_threads": [{"threads": 0, "bytes_per_second": 1e9}]},
            r"optimizer_by_threads\[0\].threads: 0 is not valid",
        ),
        ({"bf16_peak_flops_per_second": 1e12}, "bf16_flops_per_second: 1e[+]13 is above the peak of 1e[+]12"),
        ({"sources": {"host_byte": "a guess"}}, "sources: unknown key 'host_byte'; did you mean 'host_bytes'?"),
        ({"sources": {"host_bytes": 3}}, "sources.host_bytes: 3 is not a text"),
        ({"sources": ["host_bytes"]}, "sources: is not a JSON object"),
    ],
)
def test_errors_in_a_hardware_file_are_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        load_hardware(file_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"name": "a", "name": "b"}', "key 'name' appears twice"),
    ],
    ids=lambda value: value[:12],
)
def test_other_files_are_refused_as_hardware(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=f"bad.json: {complaint}"):
        load_hardware(path)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none.json: cannot be read .No such file"):
        load_hardware(str(tmp_path / "none.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"binary.json: cannot be read .not text"):
        load_hardware(tmp_path / "binary.json")


def test_an_absurd_machine_is_not_saved_over_an_old_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save_hardware(PLAIN, path)
    with pytest.raises(PlanError, match="fetch_bytes_per_second: -1"):
        save_hardware(replace(PLAIN, fetch_bandwidth=-1), path)
    assert load_hardware(path) == PLAIN
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        save_hardware(PLAIN, tmp_path / "file" / "machine.json")
    assert sorted(os.listdir(tmp_path)) == ["file", "machine.json"]
