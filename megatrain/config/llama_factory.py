"""Translate LLaMA-Factory training YAMLs to our keys.

Data sets are entries of a `dataset_info.json`, which we read unchanged.
"""

from __future__ import annotations

from pathlib import Path

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


def read_llama_factory(reader: Reader) -> None:
    put_model(reader, "model_name_or_path", "train_from_scratch")
    stage = _objective_of_stage(reader)
    _sources_of_llama_factory(reader)
    _packing_of_llama_factory(reader, stage)
    if reader.switch("mask_history"):
        reader.put("data.train_on", "last", "mask_history")
    put_sizes(reader, "per_device_train_batch_size", rows_of_a_sample(reader))
    put_length(reader, "num_train_epochs")
    put_streaming(reader)
    put_learning_rate(reader, "lr_scheduler_type")
    put_optimizer(reader, "optim")
    put_precision(reader)
    put_attention(reader, "flash_attn")
    put_saving(reader)
    put_validation(reader, "val_size")
    _trackers_of_llama_factory(reader)
    _adapter_of_llama_factory(reader)
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
    put_kto_weights(reader, ("kto_chosen_weight", "kto_rejected_weight"), is_kto=stage == "kto")
    if stage == "rm":
        reader.refuse("stage", "is not supported", "only language models are trained, no reward models")
    if stage not in ("pt", "sft", "dpo", "kto"):
        reader.refuse("stage", "is not supported", "pt, sft, dpo and kto are")
    reader.account("stage")
    if stage in ("dpo", "kto") and (stage == "kto" or loss not in ("orpo", "simpo")):
        _reference_of_llama_factory(reader)
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


def _reference_of_llama_factory(reader: Reader) -> None:
    """Put the reference model of dpo and kto. Raises `ConfigError` for any other than the model or its base."""
    fix = "train.dpo_reference is the model that the run begins with, or the base below its adapter"
    if reader.take("ref_model") not in (None, reader.said.get("model_name_or_path")):
        reader.refuse("ref_model", "is another model than the one that is trained, which is not supported", fix)
    reader.account("ref_model")
    if reader.take("ref_model_adapters"):
        reader.refuse("ref_model_adapters", "is not supported", fix)
    if reader.given.get("adapter_name_or_path"):
        reader.put("train.dpo_reference", "base", "adapter_name_or_path")


def _sources_of_llama_factory(reader: Reader) -> None:
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


def _packing_of_llama_factory(reader: Reader, stage: str) -> None:
    packs, apart = reader.switch("packing"), reader.switch("neat_packing")
    if prefers(reader):
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


def _trackers_of_llama_factory(reader: Reader) -> None:
    names = reader.texts("report_to", reader.take("report_to") or [])
    put_trackers(reader, names, "report_to")


def _adapter_of_llama_factory(reader: Reader) -> None:
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
        goes_on_from(reader, "adapter_name_or_path", path)
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
