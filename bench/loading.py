"""Peak host memory while a model is loaded, initialised or exported, against its store plus its largest unit.

    python -m bench.loading [--parameters 1.5e9] [--what files|config|export ...] [--precision fp32|bf16] [--experts N]
                            [--folder FOLDER] [--json FILE]

The model is a Llama of about that size, or a mixture of experts (`--experts`). For `files` its weights are written
first, as bfloat16 safetensors, shard by shard; `config` initialises them; `export` writes them in a precision from the
store of a model that has trained, and deletes the folder again. No model with weights ever exists. The store is that of
training in `bf16`: 12 bytes per parameter, of which loading touches 4; what else there is of it is touched beforehand,
so that the whole store counts. Peak is the largest resident size of the process (`VmHWM`, reset before, mapped files
included), above the resident size before the store was allocated. The claim: at most the store and one unit in float32,
plus 5%. Each is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig

from bench.step import _resident
from megatrain.device import open_device
from megatrain.memory import Ledger, Pool, Store
from megatrain.model import FreshSource, PretrainedSource, Source, port_model
from megatrain.model.skeleton import blueprint
from megatrain.optim import AdamW
from megatrain.schedule import build_step
from megatrain.spec import ModelSpec, Numerics, Part, Policy, Precision, Work
from tests.saved import export_model

What = Literal["files", "config", "export"]
ALLOWANCE = 0.05
SHARD_NBYTES = 256 << 20
VOCABULARY = 32_000
TRAINED = {Part.WEIGHTS: 0x3F80, Part.LOW_BITS: 1, Part.MOMENTS: 1}


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


def write_folder(config: PreTrainedConfig, folder: Path) -> None:
    """A checkpoint of random bfloat16 weights, in shards, with no more than one shard in memory."""
    model = blueprint(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def put_down() -> None:
        name = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, parameter in model.named_parameters():
        if shard and sum(tensor.nbytes for tensor in shard.values()) + 2 * parameter.numel() > SHARD_NBYTES:
            put_down()
        shard[name] = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(std=0.02)
    put_down()
    index = {"metadata": {"total_size": 2 * model.num_parameters()}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def store_of(spec: ModelSpec, pool: Pool, resident: Mapping[Part, int]) -> Store:
    """The state of a model that trains. resident: parts of which no page is left untouched -> what fills them."""
    policy = Policy(shares_memory=True)
    buffers = build_step(spec, Numerics(), policy, Work((1,))).buffers.values()
    pool.provide(buffer for buffer in buffers if buffer.is_state)
    store = Store(spec, Numerics(), policy, pool)
    for unit in store.units:
        sizes = {Part.WEIGHTS: unit.layout.size, Part.LOW_BITS: unit.trained}
        for part, value in resident.items():
            size = sizes.get(part, len(AdamW.STATE) * unit.trained)
            unit.read(part, 0, size).fill(value)  # in place, so that nothing but the store is in memory
    return store


def work_of(
    what: What, config: PreTrainedConfig, folder: Path, pool: Pool, precision: Precision
) -> Callable[[], object]:
    """What is measured; of an export the store is there before."""
    if what == "export":
        ported = port_model(blueprint(config), torch.bfloat16)
        store = store_of(ported.spec, pool, TRAINED)
        return lambda: export_model(ported, store.master, folder / "export", precision=precision)

    def load() -> None:
        """What an engine does with a source: take the structure apart, allocate, fill."""
        opened: Source = PretrainedSource(folder) if what == "files" else FreshSource(config, 0)
        spec = port_model(opened.model, torch.bfloat16).spec
        store = store_of(spec, pool, {Part.MOMENTS: 0})
        opened.fill(store, [[param.name for param in unit.params] for unit in spec.units])

    return load


def measure(
    parameters: float, what: What, folder: Path, precision: Precision = "fp32", experts: int = 0
) -> dict[str, Any]:
    """Load, initialise or export such a model with files in a new folder below `folder`; bytes and seconds."""
    AdamW().warm_up()
    device = open_device("cpu")
    spec = port_model(blueprint(config_of(parameters, experts)), torch.bfloat16).spec
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for size in (1e6, parameters):  # what the first one imports stays
            place, config = Path(temporary) / f"{size:g}", config_of(size, experts)
            if what == "files":
                write_folder(config, place)
            pool = Pool(device, Ledger())
            gc.collect()
            before = _resident("VmRSS")
            work = work_of(what, config, place, pool, precision)
            Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
            peak = _resident("VmHWM") - before
            state = pool.ledger.nbytes("host")
            pool.release()
        written = sum(path.stat().st_size for path in (place / "export").glob("*"))
    device.close()
    unit = 4 * max(unit.numel for unit in spec.units)
    return {
        **{"what": what, "precision": precision, "experts": experts},
        "parameters": spec.numel,
        "layers": len(spec.layers),
        "store_nbytes": state,
        "largest_unit_nbytes": unit,
        "bound_nbytes": round((1 + ALLOWANCE) * (state + unit)),
        "peak_nbytes": peak,
        "peak_to_store_and_unit": peak / (state + unit),
        "written_nbytes": written,
        "seconds": seconds,
        "holds": peak <= (1 + ALLOWANCE) * (state + unit),
    }


def show(result: dict[str, Any]) -> str:
    """A measurement in words."""
    mib = {name: value / (1 << 20) for name, value in result.items() if name.endswith("nbytes")}
    return (
        f"{result['parameters'] / 1e6:,.0f}M parameters, {result['what']}: peak {mib['peak_nbytes']:,.0f} MiB, "
        f"{result['peak_to_store_and_unit']:.3f}x the store ({mib['store_nbytes']:,.0f} MiB) and its largest unit in "
        f"float32 ({mib['largest_unit_nbytes']:,.0f} MiB); allowed {mib['bound_nbytes']:,.0f} MiB; "
        f"{result['seconds']:.1f} s, {result['parameters'] / result['seconds'] / 1e6:,.1f}M parameters/s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="peak memory while loading, initialising and exporting")
    parser.add_argument("--parameters", type=float, default=1.5e9)
    parser.add_argument("--what", choices=get_args(What), nargs="+", default=get_args(What))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of an export")
    parser.add_argument("--experts", type=int, default=0, help="experts per layer; 0 for a dense model")
    parser.add_argument("--folder", type=Path, default=None, help="below which files are written")
    parser.add_argument("--json", type=Path, default=None, help="write the results to this file")
    given = parser.parse_args(arguments)
    results = []
    with tempfile.TemporaryDirectory() as somewhere:
        for what in given.what:
            asked = given.parameters, what, given.folder or Path(somewhere), given.precision, given.experts
            with multiprocessing.get_context("spawn").Pool(1) as process:
                results.append(process.apply(measure, asked))
            print(show(results[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n")
    if not all(result["holds"] for result in results):
        raise SystemExit("the claim does not hold")


if __name__ == "__main__":
    main()
