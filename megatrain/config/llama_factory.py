"""Translate LLaMA-Factory training YAMLs to our keys, with a line about each key that has no counterpart.

A file that asks for a method we do not have is refused. Data sets are entries of a `dataset_info.json`, which we read
unchanged. Models and other files named in the YAML (DeepSpeed's, for example) are not read.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain.config.keys import Config
from megatrain.config.load import complaint, read
from megatrain.config.translation import TABLES, Reader, Translation, is_number
from megatrain.errors import ConfigError

SCHEDULERS, ATTENTION = TABLES["schedulers"], TABLES["attention"]
OTHER_ADAMW = ("galore", "adopt", "apollo", "schedule_free", "stable", "grok")
"""Optimizers with `adamw` in their names that compute other updates."""
MUON = (
    "matrices of layers are updated so there and here, with the same rates; routers too there, by AdamW here; experts "
    "that are stacked in one weight by AdamW there, one by one here; train.muon.matrices changes that"
)
TRACKERS = ("tensorboard", "wandb", "trackio")
UNSENT = "wandb writes to the run folder, for `wandb sync`; set output.trackers_online to send during the run"
STEPS_ALONE = "{} counts steps; `megatrain train` says at its start how many steps an epoch has"


def translate(path: Path) -> Translation:
    """Translate the LLaMA-Factory YAML `path` to a valid configuration of ours.

    Raises `ConfigError`, with file and line, for a file of another trainer, a method we do not have, or a bad value.
    """
    given, places = read(path)
    if "model_name_or_path" not in given:
        what, fix = "is not a LLaMA-Factory YAML: it has no model_name_or_path", "give a file that it could train from"
        if "base_model" in given:
            what = "is an Axolotl YAML, which is not translated"
            fix = "write its keys into a configuration: of each that is called otherwise here, the error tells the name"
        elif "train_dataset" in given:
            what = "is for LLaMA-Factory's v1, which is not supported"
            fix = "give a file with the keys of LLaMA-Factory's examples/train_full"
        raise ConfigError(what, where=str(path), fix=fix)
    reader = Reader(path, given, places)
    _read(reader)
    reader.by_the_table()
    try:
        Config.model_validate(reader.translation.tree)
    except ValidationError as error:
        raise complaint(error, path, reader.came_from) from None
    return reader.translation


def _read(reader: Reader) -> None:
    _put_model(reader)
    stage = _objective_of_stage(reader)
    _put_sources(reader)
    _put_packing(reader, stage)
    if reader.switch("mask_history"):
        reader.put("data.train_on", "last", "mask_history")
    _put_sizes(reader)
    _put_length(reader)
    _put_streaming(reader)
    _put_learning_rate(reader)
    _put_optimizer(reader)
    _put_precision(reader)
    _put_attention(reader)
    _put_saving(reader)
    _put_validation(reader)
    _put_trackers(reader)
    _put_adapter(reader)
    if reader.take("do_predict"):
        reader.refuse("do_predict", "asks for predictions, not training", "see `megatrain generate`")
    if "enable_thinking" in reader.given:
        kwargs = {"enable_thinking": reader.take("enable_thinking")}
        reader.put("data.chat_template_kwargs", kwargs, "enable_thinking")
    what = "the model's own template is used; for another, set data.chat_template to a file"
    reader.leave("template", what)


def _objective_of_stage(reader: Reader) -> str:
    stage, loss = reader.take("stage"), reader.take("pref_loss")
    beta, gamma = reader.take("pref_beta"), reader.take("simpo_gamma")
    _put_kto_weights(reader, is_kto=stage == "kto")
    if stage == "rm":
        reader.refuse("stage", "is not supported", "only language models are trained, no reward models")
    if stage not in ("pt", "sft", "dpo", "kto"):
        reader.refuse("stage", "is not supported", "pt, sft, dpo and kto are")
    reader.account("stage")
    if stage in ("dpo", "kto") and (stage == "kto" or loss not in ("orpo", "simpo")):
        _put_reference(reader)
    if stage == "kto":
        reader.put("train.objective", "kto", "stage")
        reader.put("train.beta", beta, "pref_beta")
    if stage != "dpo":
        return str(stage)
    if loss not in ("sigmoid", "ipo", "orpo", "simpo"):
        reader.refuse("pref_loss", "is not a loss supported here", "sigmoid, ipo, orpo and simpo are")
    objective = loss if loss in ("orpo", "simpo") else "dpo"
    reader.put("train.objective", objective, "pref_loss")
    reader.put("train.beta", beta, "pref_beta")
    if objective == "simpo":
        reader.put("train.simpo_gamma", gamma, "simpo_gamma")
    if loss == "ipo":
        reader.put("train.dpo_loss", "ipo", "pref_loss")
    return str(stage)


def _put_reference(reader: Reader) -> None:
    """Put the reference model of dpo and kto. Raises `ConfigError` for any other than the model or its base."""
    fix = "train.dpo_reference is the model that the run begins with, or the base below its adapter"
    if reader.take("ref_model") not in (None, reader.said.get("model_name_or_path")):
        reader.refuse("ref_model", "is another model than the one that is trained, which is not supported", fix)
    reader.account("ref_model")
    if reader.take("ref_model_adapters"):
        reader.refuse("ref_model_adapters", "is not supported", fix)
    if reader.given.get("adapter_name_or_path"):
        reader.put("train.dpo_reference", "base", "adapter_name_or_path")


def _put_sources(reader: Reader) -> None:
    folder = str(reader.take("dataset_dir"))
    reader.account("dataset_dir")

    def called(name: str) -> str:
        if name.startswith("REMOTE:"):
            return name.removeprefix("REMOTE:")
        return name if folder == "ONLINE" else str(Path(folder) / f"dataset_info.json#{name}")

    if "dataset" not in reader.given:
        reader.refuse("dataset", "is required", "name a data set of dataset_info.json")
    reader.put("data.sources", [called(name) for name in reader.texts("dataset", reader.take("dataset"))], "dataset")
    if validation := reader.take("eval_dataset"):
        reader.put(
            "data.validation", [called(name) for name in reader.texts("eval_dataset", validation)], "eval_dataset"
        )
    if shares := reader.take("interleave_probs"):
        reader.put(
            "data.weights",
            [_share(reader, share) for share in reader.texts("interleave_probs", shares)],
            "interleave_probs",
        )
    reader.leave("mix_strategy", "sources are mixed in proportion to their rows, or by data.weights")


def _share(reader: Reader, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        reader.refuse("interleave_probs", "is not a list of numbers")


def _put_packing(reader: Reader, stage: str) -> None:
    packs, apart = reader.switch("packing"), reader.switch("neat_packing")
    if reader.prefers:
        return
    if stage == "pt":
        if packs or "packing" not in reader.said:
            reader.account("packing")  # text is cut into sequences here, too
            reader.put("data.bos", False, "stage")
            reader.note(
                "stage", "texts begin without bos (data.bos), which LLaMA-Factory puts at most before a sequence"
            )
        else:
            reader.leave("packing", "texts are cut into full sequences, without gaps between them")
    elif packs or apart:
        reader.put("data.packing", "best_fit", "packing", "neat_packing")
        if not apart:
            reader.note("packing", "samples that share a sequence do not attend to each other here")
    else:
        reader.put("data.packing", "grouped", "packing")


def _put_adapter(reader: Reader) -> None:
    method, path = reader.take("finetuning_type"), reader.take("adapter_name_or_path")
    rank, alpha, dropout = (reader.number(name) for name in ("lora_rank", "lora_alpha", "lora_dropout"))
    target, more = reader.take("lora_target"), reader.take("additional_target")
    if method not in ("lora", "full"):
        reader.refuse("finetuning_type", "is not supported", "lora and full are; train.freeze freezes by name")
    reader.account("finetuning_type")
    if method == "full":
        return
    reader.put("adapter", {"type": "lora"}, "finetuning_type")
    if path is not None:
        if reader.switch("create_new_adapter"):
            fix = "merge the adapter with `megatrain export`, and name the result as model_name_or_path"
            reader.refuse("create_new_adapter", "beside an adapter is not supported", fix)
        _go_on_from(reader, path)
        return
    reader.put("adapter.r", rank, "lora_rank")
    reader.put("adapter.alpha", alpha or 2 * rank, "lora_alpha")
    if dropout:
        reader.put("adapter.dropout", dropout, "lora_dropout")
    reader.put(
        "adapter.target_modules",
        ["all-linear"] if target == "all" else reader.texts("lora_target", target),
        "lora_target",
    )
    if more:
        reader.put("adapter.modules_to_save", reader.texts("additional_target", more), "additional_target")


def _put_model(reader: Reader) -> None:
    name = "model_name_or_path"
    model = reader.take(name)
    if reader.switch("train_from_scratch"):
        reader.put("model.config", model, name, "train_from_scratch")
        reader.put("data.tokenizer", model, name)
    else:
        reader.put("model.path", model, name)


def _put_kto_weights(reader: Reader, *, is_kto: bool) -> None:
    for name, ours in (("kto_chosen_weight", "desirable"), ("kto_rejected_weight", "undesirable")):
        value = reader.number(name)
        if is_kto and value is not None:
            reader.put(f"train.kto_{ours}_weight", value, name)


def _put_sizes(reader: Reader) -> None:
    """Put the batch size: a sample of a preference objective is 2 of our sequences."""
    name, rows = "per_device_train_batch_size", 2 if reader.prefers else 1
    size, count = reader.number(name), reader.number("gradient_accumulation_steps")
    if reader.translation.tree["train"].get("objective") == "kto":
        reader.put("train.micro_batch_size", size * rows, name)
        reader.put("train.gradient_accumulation_steps", count, "gradient_accumulation_steps")
        reader.note(name, "also counts each answer's mismatched sequence here, for the KL term of a micro-batch")
        return
    reader.put("train.global_batch_size", size * count * rows, name, "gradient_accumulation_steps")
    pairs = " and counts both answers of a pair" if rows == 2 else ""
    what = f"train.global_batch_size is for one GPU{pairs}; multiply it by the number of GPUs the file was written for"
    reader.note(name, f"{what}. The planner chooses how many sequences are computed at once")


def _put_length(reader: Reader) -> None:
    name = "num_train_epochs"
    steps, epochs = reader.take("max_steps"), reader.take(name)
    if steps is None or steps == -1:
        reader.put("train.epochs", epochs, name)
    else:
        reader.put("train.steps", steps, "max_steps")
        reader.leave(name, "max_steps takes precedence")


def _put_streaming(reader: Reader) -> None:
    """Put data.streaming if it is possible. Needs sources, weights, length and objective to be put before."""
    train, data = reader.translation.tree["train"], reader.translation.tree["data"]
    if not reader.switch("streaming"):
        return
    if "steps" in train and "objective" not in train and (len(data["sources"]) == 1 or "weights" in data):
        reader.put("data.streaming", True, "streaming")
    else:
        what = "data.streaming needs cross-entropy, max_steps, and weights if there are several sources; it is left off"
        reader.leave("streaming", what)


def _put_learning_rate(reader: Reader) -> None:
    name = "lr_scheduler_type"
    shape, more = str(reader.take(name)), reader.mapping("lr_scheduler_kwargs")
    decay = more.pop("decay_type", "cosine") if shape == "warmup_stable_decay" else "linear"
    steps, ratio, rate = (reader.number(each) for each in ("warmup_steps", "warmup_ratio", "learning_rate"))
    reader.put("train.learning_rate", rate, "learning_rate")
    if shape in SCHEDULERS:
        reader.put("train.lr_scheduler", SCHEDULERS[shape], name)
        if decay != "linear":
            reader.note(name, f"the decay is linear here, {decay} there")
    else:
        reader.leave(
            name, f"train.lr_scheduler is {', '.join(dict.fromkeys(SCHEDULERS.values()))}; it is left at cosine"
        )
    _put_shape(reader, more, rate)
    if shape == "constant":
        for warmup in ("warmup_steps", "warmup_ratio"):
            reader.leave(warmup, "the constant schedule has no warm-up there either; constant_with_warmup has")
    elif isinstance(steps, float) and 0 < steps < 1:
        reader.put("train.warmup_ratio", steps, "warmup_steps")
    elif steps is not None and steps > 0:
        reader.put("train.warmup_steps", ceil(steps), "warmup_steps")
        reader.leave("warmup_ratio", "warmup_steps takes precedence")
    elif ratio and steps is None:
        reader.put("train.warmup_ratio", ratio, "warmup_ratio")


def _put_shape(reader: Reader, more: dict[str, Any], rate: float) -> None:
    """Put the final learning rate and the length of the decay; `more` holds the scheduler's keyword arguments."""
    known = ("min_lr", "min_lr_rate", "min_lr_ratio", "num_decay_steps")
    given = {name: more.pop(name) for name in known if is_number(more.get(name))}
    least = given.get("min_lr", 0.0) / (rate or 1.0)
    share = given.get("min_lr_rate") or given.get("min_lr_ratio") or least
    reader.put("train.min_lr_ratio", share, "lr_scheduler_type")
    if decay := given.get("num_decay_steps"):
        reader.put("train.decay_steps", decay, "lr_scheduler_kwargs")
    if more:
        reader.leave("lr_scheduler_kwargs", f"nothing reads {', '.join(more)}")
    else:
        reader.account("lr_scheduler_kwargs")


def _put_optimizer(reader: Reader) -> None:
    name, is_muon = "optim", reader.switch("use_muon")
    kind = str(reader.take(name))
    if is_muon:
        reader.put("train.optimizer", "muon", "use_muon")
        reader.put("train.no_decay", [], "use_muon")
        reader.note("use_muon", MUON)
    elif "adamw" not in kind or any(word in kind for word in OTHER_ADAMW):
        reader.leave(name, "AdamW is used instead, with the betas below; the learning rate may not carry over")
    elif any(word in kind for word in ("8bit", "4bit", "fp8")):
        reader.note(name, "AdamW's state is in float32 here, in host memory")
    betas = ("adam_beta1", "adam_beta2")
    reader.put("train.betas", [reader.take(each) for each in betas], *betas)
    reader.account(name)
    reader.put("train.eps", reader.take("adam_epsilon"), "adam_epsilon")
    reader.put("train.weight_decay", reader.take("weight_decay"), "weight_decay")
    reader.put("train.max_grad_norm", reader.take("max_grad_norm") or None, "max_grad_norm")


def _put_precision(reader: Reader) -> None:
    names = ("bf16", "fp16", "fp32", "pure_bf16")
    given = {name: value for name in names if (value := reader.take(name)) is not None}
    for name, value in given.items():
        if value not in (0, 1):
            reader.refuse(name, "is neither true nor false", "write it without quotes")
    reader.account(*given)
    if given.get("fp32") or (given and not any(given.values())):
        reader.put("train.precision", "fp32", next(iter(given)))
        return
    reader.put("train.precision", "bf16", "bf16")
    if given.get("fp16") and not given.get("bf16"):
        reader.note("fp16", "bfloat16 takes its place, which needs no loss scaling")
    if given.get("pure_bf16"):
        reader.note("pure_bf16", "exact float32 masters are kept beside the bfloat16 weights")


def _put_attention(reader: Reader) -> None:
    asked = reader.take("flash_attn")
    if asked is not None and str(asked) in ATTENTION:
        reader.put("model.attention", ATTENTION[str(asked)], "flash_attn")
    elif asked is not None:
        reader.leave("flash_attn", f"model.attention is {', '.join(dict.fromkeys(ATTENTION.values()))}")


def _put_saving(reader: Reader) -> None:
    strategy, every = reader.take("save_strategy"), reader.number("save_steps")
    if strategy == "best":
        reader.put("checkpoint.keep_best", 1, "save_strategy")
    elif strategy in ("no", False):  # YAML reads an unquoted `no` as false
        reader.put("checkpoint.every", 0, "save_strategy")
    elif strategy == "epoch" or isinstance(every, float):
        name = "save_strategy" if strategy == "epoch" else "save_steps"
        reader.leave(name, STEPS_ALONE.format("checkpoint.every"))
    elif every is not None:
        reader.put("checkpoint.every", every, "save_steps", "save_strategy")
    if (kept := reader.take("save_total_limit")) is not None:
        reader.put("checkpoint.keep_last", kept, "save_total_limit")
    reader.put("output.folder", reader.take("output_dir"), "output_dir")
    if "resume_from_checkpoint" in reader.given:
        reader.leave("resume_from_checkpoint", "another trainer's checkpoint cannot be resumed; model.path may name it")


def _put_validation(reader: Reader) -> None:
    name = "val_size"
    held, others = reader.number(name), "validation" in reader.translation.tree["data"]
    strategy, every = reader.take("eval_strategy"), reader.number("eval_steps")
    strategy = strategy if (earlier := reader.take("evaluation_strategy")) is None else earlier
    if strategy == "steps" and every is None:
        every = reader.given.get("logging_steps")
    if not others and held is not None and 0 <= held < 1:
        reader.put("data.validation_fraction", float(held), name)
    elif held and not others:
        reader.leave(name, "is a number of samples; data.validation_fraction is a share and is left at its default")
    if not others and not held:
        for key in ("eval_steps", "eval_strategy", "evaluation_strategy"):
            reader.leave(key, "there is no validation data")
    elif strategy in ("no", False):
        reader.put("train.eval_every", 0, "eval_strategy", "evaluation_strategy")
    elif strategy == "epoch" or isinstance(every, float):
        for key in ("eval_strategy", "evaluation_strategy") if strategy == "epoch" else ("eval_steps",):
            reader.leave(key, STEPS_ALONE.format("train.eval_every"))
    elif every is not None:
        reader.put("train.eval_every", every, "eval_steps", "eval_strategy", "evaluation_strategy")


def _put_trackers(reader: Reader) -> None:
    key = "report_to"
    names = reader.texts(key, reader.take(key) or [])
    known = [name for name in names if name in TRACKERS]
    if [name for name in names if name not in (*TRACKERS, "none")]:
        reader.leave(key, f"output.trackers can be {', '.join(TRACKERS)}")
    elif names:
        reader.put("output.trackers", known, key)
    if "wandb" in known:
        reader.note(key, UNSENT)


def _go_on_from(reader: Reader, path: Any) -> None:
    name = "adapter_name_or_path"
    folders = reader.texts(name, path)
    if len(folders) != 1:
        reader.refuse(name, "is not one adapter", "name the one to continue from")
    reader.put("adapter.path", folders[0], name)
    reader.note(name, "an adapter that is trained further keeps its own settings")
