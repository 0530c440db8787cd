"""Translate Axolotl training YAMLs to our keys.

Axolotl says for each data set how to read it; we say it once for all sources, so entries that differ are reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.config.renamed_keys import tables
from megatrain.config.translation import (
    Reader,
    goes_on_from,
    prefers,
    put_attention,
    put_kto_weights,
    put_learning_rate,
    put_length,
    put_model,
    put_optimizer,
    put_precision,
    put_saving,
    put_sizes,
    put_streaming,
    put_trackers,
    put_validation,
    rows_of_a_sample,
)
from megatrain.system.paths import usable_path

TABLES = tables()["axolotl"]
FORMATS, LOADERS = TABLES["formats"], TABLES["loaders"]


def read_axolotl(reader: Reader) -> None:
    put_model(reader, "base_model", "reinit_weights")
    if tokenizer := reader.take("tokenizer_config"):
        reader.put("data.tokenizer", tokenizer, "tokenizer_config")
    _objective_of_axolotl(reader)
    _sources_of_axolotl(reader)
    _validation_of_axolotl(reader)
    _template_of_axolotl(reader)
    packs = reader.switch("sample_packing")
    if not prefers(reader) and reader.translation.tree["data"].get("format") != "text":
        reader.put("data.packing", "best_fit" if packs else "grouped", "sample_packing")
    _too_long_of_axolotl(reader)
    if reader.given.get("shuffle_merged_datasets") is False:
        reader.leave("shuffle_merged_datasets", "data is shuffled, by train.seed")
    put_sizes(reader, "micro_batch_size", rows_of_a_sample(reader), reader.number("batch_size"))
    put_length(reader, "num_epochs")
    put_streaming(reader)
    put_learning_rate(reader, "lr_scheduler")
    put_optimizer(reader, "optimizer")
    put_precision(reader)
    put_attention(reader, "attention")
    put_saving(reader)
    put_validation(reader, "val_set_size")
    asked = {
        "wandb": bool(reader.given.get("wandb_project")),
        **{name: reader.switch(f"use_{name}") for name in ("tensorboard", "trackio")},
    }
    named = reader.texts("report_to", reader.take("report_to") or [])
    names = [name for name, is_asked in asked.items() if is_asked] + named
    reader.account("use_tensorboard", "use_trackio")
    put_trackers(reader, names, "report_to" if "report_to" in reader.said else "wandb_project")
    if reader.switch("auto_resume_from_checkpoints"):
        reader.put("resume", "auto", "auto_resume_from_checkpoints")
    _adapter_of_axolotl(reader)


def _too_long_of_axolotl(reader: Reader) -> None:
    if reader.translation.tree["data"].get("format") == "text":
        return
    what = reader.take("excess_length_strategy")
    reader.put("data.too_long", "cut" if what == "truncate" else "drop", "excess_length_strategy")
    if what == "raise":
        reader.note("excess_length_strategy", "too long samples are dropped and counted")


def _objective_of_axolotl(reader: Reader) -> None:
    objective, of_trl = reader.take("rl"), reader.mapping("trl")
    beta, alpha, gamma = reader.take("rl_beta"), reader.take("orpo_alpha"), reader.take("simpo_gamma")
    losses, weights = reader.take("dpo_loss_type"), reader.take("dpo_loss_weights")
    for name in ("reward_model", "process_reward_model"):
        if reader.take(name):
            reader.refuse(name, "is not supported", "only language models are trained, no reward models")
    if reader.given.get("unfrozen_parameters"):
        reader.refuse("unfrozen_parameters", "is not supported", "remove it; train.freeze names what is not trained")
    put_kto_weights(reader, ("kto_desirable_weight", "kto_undesirable_weight"), is_kto=objective == "kto")
    if objective is None:
        return
    if objective not in ("dpo", "ipo", "orpo", "simpo", "kto"):
        reader.refuse("rl", "is not supported", "dpo, ipo, orpo, simpo and kto are")
    if of_trl.get("beta") is not None:
        beta = of_trl["beta"]
    elif alpha is not None and "rl_beta" not in reader.said:
        beta = alpha
    reader.put("train.objective", "dpo" if objective == "ipo" else objective, "rl")
    reader.put("train.beta", beta, "rl_beta", "orpo_alpha", "trl")
    if objective == "simpo":
        reader.put("train.simpo_gamma", gamma, "simpo_gamma")
    if objective == "ipo":
        reader.put("train.dpo_loss", "ipo", "rl")
    if objective == "dpo" and losses is not None:
        if losses not in ("sigmoid", "ipo", ["sigmoid"], ["ipo"]) or weights not in (None, [1.0]):
            reader.refuse("dpo_loss_type", "is not supported", "one of sigmoid and ipo is, with a weight of 1")
        reader.put("train.dpo_loss", losses if isinstance(losses, str) else losses[0], "dpo_loss_type")
        reader.account("dpo_loss_weights")
    if objective == "simpo":
        reader.note("rl", "without the cross-entropy that TRL adds with weight cpo_alpha (1 by default)")
    if objective == "orpo":
        reader.note("rl", "the cross-entropy covers the answer only; TRL's includes the prompt")


def _sources_of_axolotl(reader: Reader) -> None:
    sets, texts = reader.take("datasets"), reader.take("pretraining_dataset")
    if not sets and not texts:
        reader.refuse("datasets", "is required", "name a data set")
    name = "datasets" if sets else "pretraining_dataset"
    entries = _entries(reader, name, sets or texts)
    reader.put("data.sources", [source for sources, _ in entries for source in sources], name)
    if texts:
        entries = [(sources, {"data.format": "text", **keys}) for sources, keys in entries]
    _agreed(reader, name, [keys for _, keys in entries])


def _validation_of_axolotl(reader: Reader) -> None:
    if not (tests := reader.take("test_datasets")):
        return
    entries = _entries(reader, "test_datasets", tests)
    reader.put("data.validation", [source for sources, _ in entries for source in sources], "test_datasets")
    splits = sorted({keys["data.split"] for _, keys in entries if "data.split" in keys})
    if splits:
        reader.put("data.validation_split", splits[0], "test_datasets")
    if len(splits) > 1:
        reader.translation.left_out.append(f"test_datasets: all share one data.validation_split; {splits[0]} is used")
    data = reader.translation.tree["data"]
    said = {key for _, keys in entries for key in keys if keys[key] != data.get(key.removeprefix("data."))}
    for key in sorted(said - {"data.split"}):
        reader.translation.left_out.append(f"test_datasets: is read by the same {key} as datasets")


def _entries(reader: Reader, name: str, given: Any) -> list[tuple[list[str], dict[str, Any]]]:
    """`_entry` of each data set in a list, or of a single one."""
    listed = given if isinstance(given, list) else [given]
    if not all(isinstance(each, dict | str) for each in listed):
        reader.refuse(name, "is not a list of data sets")
    return [_entry(reader, name, number, each) for number, each in enumerate(listed)]


def _entry(reader: Reader, of: str, number: int, entry: Any) -> tuple[list[str], dict[str, Any]]:
    """The sources of one entry, and our keys for reading them."""
    rest = {"path": entry} if isinstance(entry, str) else dict(entry)
    _refuse_odd(reader, of, number, rest)
    files, path = rest.pop("data_files", None), rest.pop("path", None)
    if files and path not in LOADERS and not usable_path(str(path)).exists():
        what = f"names files of a data set on the hub in entry {number}, which is not supported"
        reader.refuse(of, what, "download them, and name them as data_files of `path: json`")
    sources = reader.texts(of, files) if files else [path]
    keys: dict[str, Any] = {}
    kind = rest.pop("type", None)
    where = f"{of}[{number}]"
    if isinstance(kind, dict):
        rest |= kind
        if not prefers(reader):
            keys["data.format"] = "alpaca"
    elif prefers(reader):
        _read_pairs(reader, of, number, kind, rest, keys)
    elif kind is not None:
        if (plain := kind.partition(".")[0].partition(":")[0]) not in FORMATS and of != "pretraining_dataset":
            fix = f"supported are {', '.join(FORMATS)}"
            reader.refuse(of, f"has the type {kind!r} in entry {number}, which is not supported", fix)
        keys["data.format"] = FORMATS.get(plain, "text")
        if plain == "alpaca":
            what = "rows become chats in the model's own template; Axolotl uses Alpaca's prompt text"
            reader.translation.notes.append(f"{where}.type=alpaca: {what}")
    for theirs, ours in (("split", "data.split"), ("name", "data.subset")):
        if (value := rest.pop(theirs, None)) is not None:
            if "[" in str(value):
                what = f"parts of a split are not supported; the whole split is read (entry {number})"
                reader.translation.left_out.append(f"{where}.{theirs}={value}: {what}")
                value = str(value).partition("[")[0]
            keys[ours] = value
    _columns(keys, rest)
    for name, meant in TABLES["as_here"].items():
        if rest.get(name) in meant:
            del rest[name]
    for name, value in rest.items():
        if name == "roles_to_train":
            reader.translation.left_out.append(f"{where}.roles_to_train: data.train_on is assistant, last or all")
        elif value is not None and value is not False:
            reader.translation.left_out.append(f"{where}.{name}={value}: no data.* key corresponds to it")
    return sources, keys


def _read_pairs(
    reader: Reader, of: str, number: int, kind: str | None, rest: dict[str, Any], keys: dict[str, Any]
) -> None:
    """Move what a type of preference data says of the columns to our `keys`, and of the messages to `rest`."""
    style, _, rows = (kind or "").partition(".")
    known = TABLES["answers" if reader.translation.tree["train"]["objective"] == "kto" else "pairs"]
    if style in ("", "passthrough", "user_defined"):
        return
    if style == "chat_template" and rows in ("", "default"):
        rest["field_prompt"] = rest.pop("field_messages", "messages")
    elif style in ("chatml", "llama3") and rows in known:
        keys["data.columns"] = dict(known[rows])
        what = f"rows become chats in the model's own template; Axolotl writes them as {style}"
        if rows == "default":
            what += ", and takes a column input or question, too, if there is no prompt"
        reader.translation.notes.append(f"{of}[{number}].type={kind}: {what}")
    elif (style, rows) not in (("chat_template", "argilla"), ("chat_template", "argilla_chat")):
        fix = "leave it out to read columns prompt, chosen and rejected; for kto prompt, completion and label"
        reader.refuse(of, f"has the type {kind!r} in entry {number}, which is not supported", fix)


def _refuse_odd(reader: Reader, of: str, number: int, entry: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for values of the wrong type in an entry."""
    for name in ("split", "name"):
        if not isinstance(entry.get(name), str | None):
            reader.refuse(of, f"has a {name} that is not a string in entry {number}")
    if not isinstance(entry.get("type"), str | dict | None):
        reader.refuse(of, f"has a type that is neither a string nor a mapping in entry {number}")
    if (files := entry.get("data_files")) is not None and not isinstance(files, str) and not _are_texts(files):
        reader.refuse(of, f"has data_files that are not a list of strings in entry {number}")
    kind = entry.get("type")
    for keys in (entry, kind if isinstance(kind, dict) else {}):
        for name in ("roles", "message_property_mappings"):
            if not isinstance(keys.get(name), dict | None):
                reader.refuse(of, f"has {name} that are not a mapping in entry {number}")
        if not all(_are_texts(names) for names in (keys.get("roles") or {}).values()):
            reader.refuse(of, f"has roles that are not lists of strings in entry {number}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


TAGS = {"role": "role_tag", "content": "content_tag"}


def _columns(keys: dict[str, Any], rest: dict[str, Any]) -> None:
    """Move the names of columns, turn keys and roles from `rest` of an entry to our `keys`."""
    columns = {
        ours: rest.pop(theirs, None) for theirs, ours in TABLES["columns"].items() if rest.get(theirs) is not None
    }
    named = {
        **{kind: rest.pop(f"message_field_{kind}", None) for kind in TAGS},
        **(rest.pop("message_property_mappings", None) or {}),
    }
    tags = {TAGS[kind]: called for kind, called in named.items() if kind in TAGS and called not in (None, kind)}
    for role, names in (rest.pop("roles", None) or {}).items():
        if odd := sorted(set(names) - set(TABLES["usual_roles"].get(role, ()))):
            tags[f"{'observation' if role == 'tool' else role}_tag"] = odd[0]
    if tags == {"role_tag": "from", "content_tag": "value"}:
        keys["data.format"], tags = "sharegpt", {}
        columns = {"conversations" if ours == "messages" else ours: name for ours, name in columns.items()}
    columns = keys.get("data.columns", {}) | {ours: name for ours, name in columns.items() if ours != name}
    if columns:
        keys["data.columns"] = columns
    else:
        keys.pop("data.columns", None)
    if tags:
        keys["data.tags"] = tags


def _agreed(reader: Reader, name: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Put each key on which all entries agree; report those that differ and leave them at their defaults."""
    for key in sorted({key for keys in entries for key in keys}):
        first = entries[0].get(key)
        if all(keys.get(key) == first for keys in entries):
            reader.put(key, first, name)
        else:
            what = f"its entries differ in {key}, which is the same for all sources here"
            reader.translation.left_out.append(f"{name}: {what}; describe them in a dataset_info.json")


def _template_of_axolotl(reader: Reader) -> None:
    tokens = reader.given.get("special_tokens")
    if isinstance(tokens, dict) and list(tokens) == ["pad_token"]:
        reader.leave("special_tokens", "padding is masked, whatever its token")
    template, jinja = reader.take("chat_template"), reader.take("chat_template_jinja")
    if isinstance(jinja, str):
        if "{" in jinja:
            reader.leave("chat_template_jinja", "save it as a .jinja file and set data.chat_template to that")
        else:
            reader.put("data.chat_template", jinja, "chat_template_jinja")
    elif template == "chatml":
        reader.put("data.chat_template", "chatml", "chat_template")
    elif template in (None, "tokenizer_default"):
        reader.account("chat_template")
    else:
        what = "the model's own template is used; for another, set data.chat_template to a file"
        reader.leave("chat_template", what)


def _adapter_of_axolotl(reader: Reader) -> None:
    kind, path = reader.take("adapter"), reader.take("lora_model_dir")
    rank, alpha, dropout = (reader.take(name) for name in ("lora_r", "lora_alpha", "lora_dropout"))
    whole, names = reader.switch("lora_target_linear"), reader.take("lora_target_modules")
    saved = reader.take("lora_modules_to_save")
    if kind is None:
        return
    if kind not in ("lora", "qlora"):
        reader.refuse("adapter", "is not supported", "use lora")
    reader.put("adapter", {"type": "lora"}, "adapter")
    if kind == "qlora":
        reader.note("adapter", "the base is not quantized: it is held in bfloat16, in host memory")
    if path is not None:
        goes_on_from(reader, "lora_model_dir", path)
        if reader.translation.tree["train"].get("objective") in ("dpo", "kto"):
            reader.put("train.dpo_reference", "base", "lora_model_dir")
        return
    reader.put("adapter.r", rank, "lora_r")
    reader.put("adapter.alpha", alpha, "lora_alpha")
    if dropout:
        reader.put("adapter.dropout", dropout, "lora_dropout")
    if isinstance(names, str) and not whole and re.search(r"[^\w.,\s]", names):
        reader.leave("lora_target_modules", "adapter.target_modules takes names, not patterns; it is left at auto")
    elif whole or names:
        targets = ["all-linear"] if whole else reader.texts("lora_target_modules", names)
        reader.put("adapter.target_modules", targets, "lora_target_modules", "lora_target_linear")
    if saved:
        reader.put("adapter.modules_to_save", saved, "lora_modules_to_save")
