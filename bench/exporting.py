"""Peak host memory while a model folder is written from a store, against the store plus its largest unit.

    python -m bench.exporting [--parameters 1.5e9] [--precision fp32|bf16] [--folder FOLDER] [--json FILE]

The store holds the state of a Llama of about that size, or of a mixture of experts (`--experts`), as training in `bf16`
has it: 12 bytes per parameter, all of them touched. No model with weights is ever built. Peak is the largest resident
size of the process while it exports (`VmHWM`, reset before), above the resident size before the store was allocated.
The claim: at most the store and one unit in float32, plus 5%. The folder written is deleted again.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from bench.step import _resident
from megatrain.device import open_device
from megatrain.memory import Ledger, Pool, Store
from megatrain.model import PortedModel, port_model
from megatrain.model.skeleton import blueprint
from megatrain.optim import AdamW
from megatrain.schedule import build_step
from megatrain.spec import Numerics, Part, Policy, Precision, Work
from tests.saved import export_model

ALLOWANCE = 0.05
VOCABULARY = 32_000


def config_of(parameters: float, experts: int) -> PreTrainedConfig:
    """A config of about that many parameters, in layers of equal size: a Llama, or a Mixtral with that many experts."""
    width = 64
    while True:
        inner = 128 * round(width / 48)
        layer = 4 * width**2 + 3 * width * inner * max(experts, 1)
        layers = round((parameters - 2 * VOCABULARY * width) / layer)
        if layers <= width // 64 + 2:
            break
        width += 64
    return AutoConfig.for_model(
        "mixtral" if experts else "llama",
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=max(layers, 1),
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        **({"num_local_experts": experts} if experts else {}),
    )


def filled_store(ported: PortedModel, pool: Pool) -> Store:
    """The state of a model that has trained, as far as memory can tell: no page of it is left untouched."""
    policy = Policy(shares_memory=True)
    buffers = build_step(ported.spec, Numerics(), policy, Work((1,))).buffers.values()
    pool.provide(buffer for buffer in buffers if buffer.is_state)
    store = Store(ported.spec, Numerics(), policy, pool)
    for unit in store.units:
        for part, size, value in (
            (Part.WEIGHTS, unit.layout.size, 0x3F80),
            (Part.LOW_BITS, unit.trained, 1),
            (Part.MOMENTS, len(AdamW.STATE) * unit.trained, 1),
        ):
            unit.read(part, 0, size).fill(value)  # in place, so that nothing but the store is in memory
    return store


def measure(parameters: float, precision: Precision, experts: int, folder: Path) -> dict[str, Any]:
    """Export such a model into a folder below `folder` and delete it; bytes and seconds."""
    ported = port_model(blueprint(config_of(parameters, experts)), torch.bfloat16)
    AdamW().warm_up()
    device = open_device("cpu")
    pool = Pool(device, Ledger())
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        tiny = port_model(blueprint(config_of(1e6, experts)), torch.bfloat16)  # what the first export loads stays
        export_model(tiny, lambda name: torch.zeros(_shapes(tiny)[name]), Path(empty) / "tiny", precision=precision)
        gc.collect()
        before = _resident("VmRSS")
        store = filled_store(ported, pool)
        gc.collect()
        held = _resident("VmRSS") - before
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        began = time.perf_counter()
        written = export_model(ported, store.master, Path(empty) / "model", precision=precision)
        seconds = time.perf_counter() - began
        peak = _resident("VmHWM") - before
        on_disk = sum(path.stat().st_size for path in written.iterdir())
    state, unit = pool.ledger.nbytes("host"), 4 * max(unit.numel for unit in ported.spec.units)
    pool.release()
    device.close()
    return {
        "parameters": ported.spec.numel,
        "layers": len(ported.spec.layers),
        "experts": experts,
        "precision": precision,
        "store_nbytes": state,
        "resident_nbytes_before_exporting": held,
        "largest_unit_nbytes": unit,
        "peak_nbytes": peak,
        "peak_to_store_and_unit": peak / (state + unit),
        "written_nbytes": on_disk,
        "seconds": seconds,
        "holds": peak <= (1 + ALLOWANCE) * (state + unit),
    }


def _shapes(ported: PortedModel) -> dict[str, tuple[int, ...]]:
    return {param.name: param.shape for unit in ported.spec.units for param in unit.params}


def show(result: dict[str, Any]) -> str:
    """The measurement in words."""
    mib = {name: value / (1 << 20) for name, value in result.items() if name.endswith("nbytes")}
    return (
        f"{result['parameters'] / 1e6:,.0f}M parameters in {result['layers']} layers as {result['precision']}: peak "
        f"{mib['peak_nbytes']:,.0f} MiB, {result['peak_to_store_and_unit']:.3f}x the store "
        f"({mib['store_nbytes']:,.0f} MiB) and its largest unit in float32 ({mib['largest_unit_nbytes']:,.0f} MiB); "
        f"{mib['written_nbytes']:,.0f} MiB written in {result['seconds']:.1f} s, "
        f"{mib['written_nbytes'] / result['seconds']:,.0f} MiB/s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="peak memory while exporting")
    parser.add_argument("--parameters", type=float, default=1.5e9)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--experts", type=int, default=0, help="experts per layer; 0 for a dense model")
    parser.add_argument("--folder", type=Path, default=None, help="on a disk with room for the model")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as somewhere:
        result = measure(given.parameters, given.precision, given.experts, given.folder or Path(somewhere))
    print(show(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    if not result["holds"]:
        raise SystemExit("more than the store and one unit, plus 5%")


if __name__ == "__main__":
    main()
