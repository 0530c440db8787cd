"""Reads model configs (from a folder, a hub name or fields) and refuses those that cannot be trained exactly.

Refused from the config alone, before a structure is built or a weights file opened: encoder-decoders, models without
text, encoders that see later tokens, checkpoints quantized in a way that `dequantize` cannot undo, and custom code
without permission. What only the structure reveals is refused by `ported`. `auto_class` decides the class of a
config's model for everyone who builds or loads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatrain.errors import ModelError, first_line
from megatrain.model.dequantize import quantizer_of
from megatrain.model.hub import cached_folder, is_local, located
from megatrain.system.paths import read_json

COMMON_FIELDS = (
    "attn_implementation",
    "head_dim",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
)
"""Fields that many configs accept without declaring them."""

SOURCES = "give a local Hugging Face folder, a hub name, or a config with a causal-LM model_type"
"""The fix for a model that cannot be found."""

TRUST = "set trust_remote_code=true if you have read its code and trust it"


def read_config(
    source: str | Path | Mapping[str, Any] | PreTrainedConfig,
    *,
    where: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedConfig:
    """Read a model's config from a local folder, a `config.json`, a hub name, or fields that include `model_type`.

    `where` names the place in errors; `revision` is a branch, tag or commit of a hub name. Raises `ModelError` for a
    config that is missing, malformed or needs code without permission, and for a field unknown to its model type.
    """
    if isinstance(source, PreTrainedConfig):
        return source
    with plain_errors(where):
        if isinstance(source, Mapping):
            fields = dict(source)
            kind = _known_kind(fields.pop("model_type", None), where)
            _refuse_unknown_fields(kind, fields, where)
            config: PreTrainedConfig = AutoConfig.for_model(kind, **fields)
            _refuse_lost_theta(source, config, where)
            return config
        name = located(source, where=where, revision=revision)
        stated = _fields_at(name, where, revision)
        if stated is not None and "auto_map" not in stated:  # otherwise its own code defines the type
            _known_kind(stated.get("model_type"), where)
        config = AutoConfig.from_pretrained(
            name, local_files_only=is_local(name), trust_remote_code=trust_remote_code, revision=revision or "main"
        )
        _refuse_lost_theta(stated or {}, config, where)
        return config


def _refuse_lost_theta(stated: Mapping[str, Any], config: PreTrainedConfig, where: str) -> None:
    """Raise `ModelError` if `config` has another rope theta than the `rope_parameters` in `stated`, its fields.

    If there is a `rope_scaling` beside `rope_parameters`, transformers 5 takes that in its place, with the class's
    default if it has no theta. A `rope_theta` beside `rope_parameters` is ignored.
    """
    for fields, part in ((stated, config), (stated.get("text_config"), getattr(config, "text_config", None))):
        if not isinstance(fields, Mapping):
            continue
        rope = fields.get("rope_parameters")
        if isinstance(rope, Mapping) and "rope_theta" in rope:
            beside = fields.get("rope_theta")
            thetas = [rope["rope_theta"], rope["rope_theta"] if beside is None else beside]
            read = (getattr(part, "rope_parameters", None) or {}).get("rope_theta")
            if read is not None and thetas != [read, read]:
                what = (
                    f"states a rope_theta of {' and '.join(map(str, dict.fromkeys(thetas)))}, but {read} would be used"
                )
                fix = "state the theta and the scaling in rope_parameters, and neither beside it"
                raise ModelError(what, where=where, fix=fix)


def _fields_at(name: str, where: str, revision: str | None) -> dict[str, Any] | None:
    """The fields in a folder's config.json, or in the file itself; `None` if only the hub has it.

    Raises `ModelError` for a file that is not a JSON object.
    """
    path = Path(name)
    folder = path if path.exists() else cached_folder(name, revision)
    if folder is None:
        return None
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        fields = read_json(file)
    except (OSError, ValueError) as error:
        if file == path and file.suffix != ".json":
            fix = "give the folder of a Hugging Face model, or of a run"
            raise ModelError("is a file, not a folder", where=where, fix=fix) from error
        what = f"its {file.name} is not a valid JSON file ({getattr(error, 'strerror', None) or error})"
        raise ModelError(what, where=where, fix="copy or download it again") from error
    if not isinstance(fields, dict):
        what = f"its {file.name} holds {type(fields).__name__}, not an object of fields"
        raise ModelError(what, where=where, fix="copy or download it again")
    return fields


def _known_kind(kind: object, where: str) -> str:
    """Return `kind` if transformers knows that model type; else raise `ModelError` with the nearest ones."""
    if kind is None:
        raise ModelError("has no model_type", where=where, fix="add model_type: llama, say")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return kind
    near = get_close_matches(str(kind).lower(), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
    fix = f"did you mean {' or '.join(near)}?" if near else "a newer transformers may know it"
    raise ModelError(f"transformers knows no model_type {str(kind)[:80]!r}", where=where, fix=fix)


POSITIONS = "max_position_embeddings"


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of positions of the text model, or `None` if nothing ends there.

    A rotary model computes any position. What its publisher states is still its limit, times the factor of a rotary
    embedding that stretches with the sequence; but the default of its class, which an older config.json leaves in place
    by silence, is nobody's statement.
    """
    text = config.get_text_config()
    positions = getattr(text, POSITIONS, None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    may_be_default = isinstance(getattr(text, "rope_parameters", None), Mapping)
    if may_be_default and positions == getattr(type(text), POSITIONS, None):
        aliases = {name for name, meant in text.attribute_map.items() if meant == POSITIONS}
        with suppress(ModelError, OSError, ValueError):  # ValueError: no name that the hub could have
            file = _fields_at(config.name_or_path, "", None) if config.name_or_path else None
            if file is not None and not _states({POSITIONS, *aliases}, file):
                return None
    stretches = [float(rope.get("factor") or 1) for rope in ropes_of(vars(text)) if "dynamic" in str(rope["rope_type"])]
    return int(positions * max([1.0, *stretches]))


def ropes_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameters of a config's rotary embeddings: one, or one for each type of layer."""
    stated = fields.get("rope_parameters") or {}
    return [rope for rope in (stated, *stated.values()) if isinstance(rope, dict) and "rope_type" in rope]


def _states(names: set[str], fields: Mapping[str, Any]) -> bool:
    """Whether one of these fields is in a config.json, or in one of its parts."""
    return bool(names & fields.keys()) or any(
        _states(names, part) for part in fields.values() if isinstance(part, dict)
    )


def set_fields(config: PreTrainedConfig, fields: Mapping[str, Any], *, where: str) -> None:
    """Change fields of a config, as `from_pretrained` does with keyword arguments.

    Raises `ModelError` for an unknown field and for a value that the config refuses.
    """
    for name, value in fields.items():
        if not hasattr(config, name):
            known = {*config.to_dict(), *config.attribute_map, *COMMON_FIELDS} - {name}
            near = get_close_matches(name, sorted(known), n=1)
            what = f"{name} is neither a field of its config nor a supported argument"
            raise ModelError(what, where=where, fix=f"did you mean {near[0]!r}?" if near else "leave it out")
        with plain_errors(where):
            setattr(config, name, value)


def refuse_other_configs(config: PreTrainedConfig, *, where: str, trust_remote_code: bool = False) -> None:
    """Raise `ModelError` unless the config describes a causal language model, with weights that can be loaded."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("an encoder-decoder, not a causal language model", where=where, fix="use a decoder-only model")
    quantizer_of(config, where=where)
    if _brings_code(config) and trust_remote_code:
        return  # its own code decides the class
    model_class = model_class_of(config)
    if model_class is None and _brings_code(config):
        raise ModelError("needs code from its own repository", where=where, fix=TRUST)
    if model_class is None:
        raise ModelError(f"a {config.model_type} is not a causal language model", where=where, fix=SOURCES)
    if "labels" not in inspect.signature(model_class.forward).parameters:
        what = f"a {model_class.__name__} has no loss of text, since its forward takes no labels"
        raise ModelError(what, where=where, fix=SOURCES)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        can_decode = hasattr(config, "is_decoder")
        raise ModelError(
            f"a {config.model_type} sees later tokens",
            where=where,
            fix="set is_decoder: true in its config" if can_decode else SOURCES,
        )


_MAPPINGS: dict[Any, Any] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}
"""transformers' auto classes of models that write text, in the order of preference, and their classes by config."""


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class of transformers whose `from_config` and `from_pretrained` give the config's model.

    It is the first whose model is named in `architectures`; if none is, the first whose model covers the whole config,
    and not just its text part; for a config that brings its own code, the one that it names. `AutoModelForCausalLM` if
    transformers has no such model.
    """
    choices = {auto: chosen for auto in _MAPPINGS if (chosen := _choice(auto, config)) is not None}
    brought = getattr(config, "auto_map", None) or {}
    ranked = (
        *(auto for auto, chosen in choices.items() if chosen.__name__ in (config.architectures or ())),
        *(auto for auto, chosen in choices.items() if isinstance(config, chosen.config_class or ())),
        *choices,
        *(auto for auto in _MAPPINGS if auto.__name__ in brought),
        AutoModelForCausalLM,
    )
    return ranked[0]


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The language-model head: the model's own, or that of the part that is a whole causal model inside it."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next((head for part in parts if (head := part.get_output_embeddings()) is not None), None)


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of transformers that `auto_class` builds, or `None` if it has none for this config."""
    return _choice(auto_class(config), config)


def _choice(auto: Any, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of an auto class for a config, or `None`; of several, the one that the config names."""
    if type(config) not in _MAPPINGS[auto]:
        return None
    known = _MAPPINGS[auto][type(config)]
    named = {kind.__name__: kind for kind in (known if isinstance(known, list | tuple) else (known,))}
    first: type[PreTrainedModel] = next(iter(named.values()))
    return next((named[name] for name in config.architectures or () if name in named), first)


_MALFORMED = (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, RuntimeError)
"""What transformers raises for a config that contradicts itself."""


@contextmanager
def plain_errors(where: str) -> Iterator[None]:
    """Turn what transformers raises about a model that it cannot read or build into a `ModelError` of one line."""
    try:
        yield
    except StrictDataclassError as error:
        said = first_line(error.__cause__ or error)  # the class's own words, or which field has a wrong type
        raise ModelError(said, where=where, fix="correct that field of its config") from error
    except (OSError, ValueError, ImportError, *_MALFORMED) as error:
        if "trust_remote_code" in str(error):
            raise ModelError("needs code from its own repository", where=where, fix=TRUST) from error
        raise ModelError(first_line(error), where=where, fix=SOURCES) from error


def _refuse_unknown_fields(kind: str, fields: Mapping[str, Any], where: str) -> None:
    """Raise `ModelError` for unknown fields: transformers silently ignores them, so a typo would train another
    model. It keeps them as they are; an old name that it turns into another field (`rotary_pct`) is gone, or only
    computed from that field (`hybrid_override_pattern`)."""
    default = AutoConfig.for_model(kind)
    known = {*default.to_dict(), *default.attribute_map, *PreTrainedConfig().to_dict(), *COMMON_FIELDS}
    for name in fields:
        if name not in known and name in vars(AutoConfig.for_model(kind, **{name: fields[name]})):
            near = get_close_matches(name, known, n=1)
            raise ModelError(
                f"{kind} has no field {name!r}",
                where=where,
                fix=f"did you mean {near[0]!r}?" if near else f"see the fields of a {kind} config.json",
            )


def _brings_code(config: PreTrainedConfig) -> bool:
    brought = getattr(config, "auto_map", None) or {}
    return any(auto.__name__ in brought for auto in _MAPPINGS)
