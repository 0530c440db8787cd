"""Resolves a model that a user names: a local folder, the folder of a run, or a name on the Hugging Face hub.

If the hub is unreachable, the library retries for half a minute and prints a line each time. So the hub is asked
here first, once and with a short timeout; if it does not answer, the library is told to look on this machine only.
`data.tokenizer` resolves tokenizers.

The dimensions of widely used models are built in, so that you can plan for one by its name, offline.
`known_models.json` has one model per line: its id on the hub, its `model_type`, and the config fields that affect sizes
and work, unless they are the type's defaults. `parameters` is the published count, minus what is not a parameter of the
library's model: buffers, a tied weight saved twice, layers for multi-token prediction, keys and values of a layer that
reads those of another. A model with images is the whole that its publisher gives, tower and all. A model is listed if a
published configuration gives its sizes and they give its count. The defaults of a class that names a checkpoint are no
such configuration: those of Qwen 3.5 have an image tower of another model's width.

Fields that only change numbers (rotary bases, epsilons, scales, token ids) are left at the library's defaults: training
reads a model's own config (`megatrain.model.architecture`). Aliases of these models and their measurements are in
`plan.measured_models`, which does not need the library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PreTrainedConfig

from megatrain.errors import ModelError
from megatrain.system import hub_client
from megatrain.system.paths import read_json, refuse_impossible_model, shown, usable_path

ADAPTER = "adapter_config.json"
"""What peft writes instead of a config.json."""

GIVE_BASE = "give it: --base BASE on the command line, from_pretrained(BASE, adapter=FOLDER) from Python"
"""What to do about an adapter whose folder does not name a base that exists."""


WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
"""Files of weights that transformers and peft load."""

SHARDS = (
    ("*zero_pp_rank_*_optim_states.pt", "DeepSpeed", "python {folder}/../zero_to_fp32.py {folder}/.. NEW"),
    ("*/*zero_pp_rank_*_optim_states.pt", "DeepSpeed", "python {folder}/zero_to_fp32.py {folder} NEW"),
    ("zero/*/fp32.pt", "DeepSpeed", "python zero_to_fp32.py, on what this universal checkpoint was converted from"),
    ("pytorch_model_fsdp_*/.metadata", "FSDP", "accelerate merge-weights {folder}/pytorch_model_fsdp_0 NEW"),
)
"""Files of other trainers' checkpoints -> who wrote them, and the command that makes a model of them."""


def model_named(source: str | Path) -> str:
    """The model that a user's argument refers to: for the folder of a run, its model; otherwise the argument itself.

    Raises `ModelError` for a run that has not saved a model yet, naming its newest checkpoint, and for an invalid
    path.
    """
    folder = usable_path(source, where="model", error=ModelError)
    within = folder / "model"
    if (folder / "config.json").exists() or not folder.is_dir():
        return str(source)
    if any((within / name).exists() for name in ("config.json", ADAPTER)):
        return str(within)
    if (folder / "metrics.jsonl").exists():
        newest = max(folder.glob("checkpoints/step-*/*config.json"), default=None)
        fix = f"use its newest checkpoint, {newest.parent}" if newest else "wait until it has ended"
        raise ModelError("is a run that has not saved a model yet", where=f"model {source}", fix=fix)
    return str(source)


def is_local(source: str | Path) -> bool:
    """Whether to look for a model on this machine only: its path exists, or the hub is unreachable."""
    return os.path.exists(source) or not hub_client.look_up_model(str(source))[0]


def located(source: str | Path, *, where: str, revision: str | None = None) -> str:
    """What to pass to transformers for `source`: an existing path with `~` expanded, or a hub name.

    Raises `ModelError` for a path that does not exist, a folder without a model, and a hub name that neither cache nor
    hub has. A path is anything that cannot be a hub name (`./a`, `a/b/c`, `a.json`), and `a/b` if a folder `a` exists.
    """
    path, text = usable_path(source, where="model", error=ModelError), str(source)
    if not path.exists():
        refuse_impossible_model(text, where)
        hub_client.refuse_absent_model(text, where, revision, known_models())
        return text
    if path.is_dir():
        _refuse_shards(path, where)
        if not (path / "config.json").exists():
            raise _no_model(path, where)
    return str(path)


def model_behind(source: str, base: str | None = None) -> str:
    """The base of an adapter's folder: `base`, or the one that it names. Any other source is returned as it is.

    Raises `ModelError` for a base that cannot be found, and for one that is given to a whole model.
    """
    folder = Path(source)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").exists():
        return base_named_in(folder, f"adapter {source}") if base is None else located(base, where=f"model {base}")
    if base is not None:
        raise ModelError("is not an adapter's folder, so it has no base", where=f"model {source}", fix="give no base")
    return source


def base_named_in(folder: Path, where: str) -> str:
    """The base model named by an adapter's folder. Raises `ModelError` if it names none, or one that cannot be
    found."""
    try:
        name = read_json(folder / ADAPTER).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"its {ADAPTER} cannot be read", where=where, fix="copy or download it again") from error
    if not name:
        raise ModelError(f"its {ADAPTER} names no base", where=where, fix=GIVE_BASE)
    try:
        return located(str(name), where=f"base of {where}")
    except ModelError as error:
        what = f"the base that it names, {shown(str(name))}, cannot be used: {error.what}"
        raise ModelError(what, where=where, fix=GIVE_BASE) from error


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of the hub's cache that holds the model called `name`, if any."""
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _refuse_shards(folder: Path, where: str) -> None:
    """Raise `ModelError` for a folder whose only weights are in another trainer's format."""
    if any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        return
    for pattern, kind, command in SHARDS:
        if any(folder.glob(pattern)):
            fix = f"convert them: {command.format(folder=folder)} (and copy the model's config.json and tokenizer); or"
            more = f"set resume={folder}, with its model as model.path, to go on with its optimizer"
            raise ModelError(f"holds its weights in shards of {kind}", where=where, fix=f"{fix} {more}")


def _no_model(folder: Path, where: str) -> ModelError:
    """The error for a folder without a config.json, depending on what it holds instead."""
    if (folder / ADAPTER).exists():
        try:
            base = f" for {read_json(folder / ADAPTER)['base_model_name_or_path']}"
        except (OSError, ValueError, LookupError, TypeError):
            base = ""
        fix = "give that model, with this folder as its adapter; or merge them: megatrain export FOLDER OUT --merge"
        return ModelError(f"holds a LoRA adapter{base}, not a whole model", where=where, fix=fix)
    fix = named_adapter(folder) or "give the folder of a Hugging Face model, or of a run"
    return ModelError("holds no config.json", where=where, fix=fix)


def named_adapter(folder: Path) -> str:
    """Which adapter to give instead of a folder in which `peft` has saved adapters under their names; "" for others."""
    inside = sorted(folder.glob(f"*/{ADAPTER}"))
    return f"give the folder of its adapter: {inside[0].parent}" if inside else ""


# Built-in models ------------------------------------------------------------------------------------------------------


def known_config(name: str) -> PreTrainedConfig:
    """A new config with the dimensions of the known model with this id."""
    fields = {**known_models()[name]}
    del fields["parameters"]
    config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.name_or_path = name  # its name in errors
    return config


@cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Id -> `model_type`, fields of the config, and `parameters`."""
    table = resources.files("megatrain.model").joinpath("known_models.json")
    content: dict[str, dict[str, Any]] = json.loads(table.read_text(encoding="utf-8"))
    return content
