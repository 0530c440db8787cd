"""Peak host memory while a model is loaded, or initialised, into a store, against the store plus its largest unit.

    python -m bench.loading [--parameters 1.5e9] [--source files|config] [--folder FOLDER] [--json FILE]

The model is a Llama of about that size. For `files` its weights are written first, as bfloat16 safetensors, shard by
shard: it never exists, here either. The store is that of training in `bf16`: 12 bytes per parameter, of which loading
touches 4; the moments are touched beforehand, so that the whole store counts. Peak is the largest resident size of the
process (`VmHWM`, reset before, mapped files included) from opening the source to the last parameter, above the resident
size before. The claim: at most the store and one unit in float32, plus 5%.
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
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from bench.exporting import ALLOWANCE, config_of
from bench.step import _resident
from megatrain.device import open_device
from megatrain.memory import Ledger, Pool, Store
from megatrain.model import FreshSource, PretrainedSource, Source, port_model
from megatrain.model.skeleton import blueprint
from megatrain.optim import AdamW
from megatrain.schedule import build_step
from megatrain.spec import ModelSpec, Numerics, Part, Policy, Work

SHARD_NBYTES = 256 << 20


def write_folder(config: PreTrainedConfig, folder: Path) -> None:
    """A checkpoint of random bfloat16 weights, in shards, with no more than one shard in memory."""
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    numbers = 0

    def put_down() -> None:
        name = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, parameter in blueprint(config).named_parameters():
        if shard and sum(tensor.nbytes for tensor in shard.values()) + 2 * parameter.numel() > SHARD_NBYTES:
            put_down()
        shard[name] = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(std=0.02)
        numbers += parameter.numel()
    put_down()
    index = {"metadata": {"total_size": 2 * numbers}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def empty_store(spec: ModelSpec, pool: Pool) -> Store:
    """The state of a model before its weights: the moments, two thirds of it, are resident already."""
    policy = Policy(shares_memory=True)
    buffers = build_step(spec, Numerics(), policy, Work((1,))).buffers.values()
    pool.provide(buffer for buffer in buffers if buffer.is_state)
    store = Store(spec, Numerics(), policy, pool)
    for unit in store.units:
        unit.read(Part.MOMENTS, 0, len(AdamW.STATE) * unit.trained).fill(0)  # in place
    return store


def measure(parameters: float, source: str, folder: Path) -> dict[str, Any]:
    """Load or initialise such a model with files in a new folder below `folder`; bytes and seconds."""
    config = config_of(parameters, experts=0)
    AdamW().warm_up()
    device = open_device("cpu")
    pool = Pool(device, Ledger())
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        files, tiny = Path(temporary) / "model", Path(temporary) / "tiny"
        _load(config_of(1e6, experts=0), source, tiny, Pool(device, Ledger()))  # what the first loading imports stays
        if source == "files":
            write_folder(config, files)
        gc.collect()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        began = time.perf_counter()
        spec = _load(config, source, files, pool)
        seconds = time.perf_counter() - began
        peak = _resident("VmHWM") - before
    state, unit = pool.ledger.nbytes("host"), 4 * max(unit.numel for unit in spec.units)
    pool.release()
    device.close()
    return {
        "source": source,
        "parameters": spec.numel,
        "layers": len(spec.layers),
        "store_nbytes": state,
        "largest_unit_nbytes": unit,
        "bound_nbytes": round((1 + ALLOWANCE) * (state + unit)),
        "peak_nbytes": peak,
        "peak_to_store_and_unit": peak / (state + unit),
        "seconds": seconds,
        "holds": peak <= (1 + ALLOWANCE) * (state + unit),
    }


def _load(config: PreTrainedConfig, source: str, folder: Path, pool: Pool) -> ModelSpec:
    """What an engine does with a source: take the structure apart, allocate, fill."""
    if source == "files" and not folder.exists():
        write_folder(config, folder)
    opened: Source = PretrainedSource(folder) if source == "files" else FreshSource(config, 0)
    spec = port_model(opened.model, torch.bfloat16).spec
    store = empty_store(spec, pool)
    opened.fill(store, [[param.name for param in unit.params] for unit in spec.units])
    return spec


def show(result: dict[str, Any]) -> str:
    """The measurement in words."""
    mib = {name: value / (1 << 20) for name, value in result.items() if name.endswith("nbytes")}
    return (
        f"{result['parameters'] / 1e6:,.0f}M parameters from {result['source']}: peak {mib['peak_nbytes']:,.0f} MiB, "
        f"{result['peak_to_store_and_unit']:.3f}x the store ({mib['store_nbytes']:,.0f} MiB) and its largest unit in "
        f"float32 ({mib['largest_unit_nbytes']:,.0f} MiB); allowed {mib['bound_nbytes']:,.0f} MiB; "
        f"{result['seconds']:.1f} s, {result['parameters'] / result['seconds'] / 1e6:,.1f}M parameters/s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="peak memory while loading")
    parser.add_argument("--parameters", type=float, default=1.5e9)
    parser.add_argument("--source", choices=("files", "config"), nargs="+", default=["files", "config"])
    parser.add_argument("--folder", type=Path, default=None, help="on a disk with room for the model")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    results = []
    with tempfile.TemporaryDirectory() as somewhere:
        for source in given.source:
            results.append(measure(given.parameters, source, given.folder or Path(somewhere)))
            print(show(results[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")
    if not all(result["holds"] for result in results):
        raise SystemExit("more than the store and one unit, plus 5%")


if __name__ == "__main__":
    main()
