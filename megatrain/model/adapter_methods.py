"""Which methods and options of `peft` can stream, and what their initialisation does to the base."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from megatrain.errors import ModelError

METHODS = (
    *("LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "MISS", "LN_TUNING"),
    *("FOURIERFT", "C3A", "ROAD", "DELORA", "WAVEFT"),
)
"""Methods of `peft` whose layers remain functions of their input; tests compare each with plain PyTorch."""

WHY_NOT = {
    "ADALORA": "changes its ranks between steps, by a loss of its own",
    "VERA": "keeps projections outside of the layers",
    "XLORA": "runs the model twice for each batch",
    "ADAPTION_PROMPT": "inserts learned tokens into the attention of only the last layers",
}
"""Why some other methods cannot stream. Prompt and prefix methods are recognised by their own flags."""

NOT_FOR_USERS = ("Model has .tie_word_embeddings=True. and", ".is_gradient_checkpointing. is deprecated")
"""Warnings of `peft`: that merging over tied weights may go wrong (`MergedSource` unties them), of its own calls."""

OPTIONS = {
    "layer_replication": ("layer_replication", "uses layers of the base several times, with an adapter for each"),
    "velora_config": ("VeLoRA", "keeps an average over its first batch and has its own backward"),
    "alora_invocation_tokens": ("aLoRA", "starts after tokens that are searched for outside the layers"),
    "monteclora_config": ("MonteCLoRA", "draws its weights in each forward and adds a loss of its own"),
}
"""Field of a `LoraConfig` -> (name, why not), for options that cannot stream."""

CHANGED_BASE = (
    "set init_lora_weights=True in its config once it is made, save it (save_pretrained), and save unload() as its base"
)
"""How an adapter that has changed its base becomes one that fits what is saved; the guide has the lines."""

NEEDS_NO_VALUES = ("LORA", "IA3", "LOHA", "LOKR")
"""Methods whose initial weights do not depend on those of the base."""

REMADE = ("pissa", "olora")
"""Values of `init_lora_weights` that change the base by what its own weights determine: `peft` changes it again when
it loads such a folder, and so does `AdaptedSource`."""

NOT_REMADE = re.compile(r"pissa_niter_\w*|corda\w*|loftq|lora_ga")
"""Values of `init_lora_weights` that change the base by chance or by data, which no folder holds."""

NOT_MERGED_BY_PEFT = {"aLoRA", "XLORA", "ADAPTION_PROMPT"}
"""Of them, those that `peft` refuses to merge, or whose strength depends on the input (X-LoRA). Learned tokens cannot
be merged, either."""

BY_PEFT = "merge it with peft (merge_and_unload), and use the merged model"


def refuse_start(start: Any) -> None:
    """Raise `ModelError` for a value of `init_lora_weights` that changes the base by what no folder holds."""
    if isinstance(start, str) and NOT_REMADE.fullmatch(start.lower()):
        what = f"init_lora_weights={start!r} has changed the base by what its folder does not hold"
        raise ModelError(what, where="adapter", fix=f"make it an adapter of the changed base: {CHANGED_BASE}")


def refuse_method(config: Any) -> None:
    """Raise `ModelError` if this method of `peft` cannot stream, or if its folder cannot say what it has changed."""
    refuse_start(getattr(config, "init_lora_weights", True))
    method = str(getattr(config.peft_type, "value", config.peft_type))
    instead = "use LoRA, say (peft.LoraConfig)"
    why = WHY_NOT.get(method, "has not been compared with plain PyTorch here")
    if method in METHODS:
        options = [field for field in OPTIONS if getattr(config, field, None)]
        if not options:
            return
        (method, why), instead = OPTIONS[options[0]], f"leave {options[0]} out of its config"
    elif getattr(config, "is_prompt_learning", False):
        why = "adds learned tokens to the text or the cache, outside the layers"
    can_merge = method not in NOT_MERGED_BY_PEFT and not getattr(config, "is_prompt_learning", False)
    fix = f"{instead}; or, if it is trained, {BY_PEFT}" if can_merge else instead
    raise ModelError(f"{method} {why}, so it cannot stream", where="adapter", fix=fix)


def begins_from_values(config: Any, *, is_saved: bool) -> bool:
    """Whether values of the base are needed to make an adapter. Raises `ModelError` if more than one module's are.

    is_saved: its weights come from a folder, so only what making them does to the base counts.
    """
    start = getattr(config, "init_lora_weights", True)
    odd = "init_lora_weights='eva'" if start == "eva" and not is_saved else ""
    odd = "kasa_config" if getattr(config, "kasa_config", None) else odd
    if is_saved and not odd:
        return changes_base(config)
    if odd:
        what = f"{odd} needs or changes the weights of the whole base"
        fix = "leave it out, or build the model in memory (peft.get_peft_model) and pass it to Engine.from_model"
        fix = BY_PEFT if is_saved else fix
        raise ModelError(what, where="adapter", fix=fix)
    needs = changes_base(config) or start == "mica" or bool(getattr(config, "use_dora", False))
    return needs or config.peft_type.value not in NEEDS_NO_VALUES


def changes_base(config: Any) -> bool:
    """Whether making an adapter changes weights of the base."""
    start = getattr(config, "init_lora_weights", True)
    return isinstance(start, str) and start.lower() in REMADE


def why_base_is_changed(config: Any) -> str:
    """What in a config has changed the base of the adapter that was made from it; empty if nothing has."""
    if getattr(config, "kasa_config", None):
        return "kasa_config"
    return f"init_lora_weights={config.init_lora_weights!r}" if changes_base(config) else ""


def refuse_absent_modules(config: Any, paths: Collection[str]) -> None:
    """Raise `ModelError` for a name in `modules_to_save` that no module has, which `peft` ignores."""
    for name in getattr(config, "modules_to_save", None) or ():
        if not any(path.endswith(name) for path in paths):
            fix = "name modules of the model, such as embed_tokens, lm_head or norm"
            raise ModelError(
                f"modules_to_save names {name}, and the model has no such module", where="adapter", fix=fix
            )


def refuse_rescaled(before: Any, config: Any) -> None:
    """Raise `ModelError` if `peft` has moved a saved adapter to fused experts and not kept its strength.

    It doubles alpha and rank, which keeps alpha / rank, but not rsLoRA's alpha / sqrt(rank), and forgets patterns.
    before: the configuration in the folder.
    """
    if before.peft_type.value != "LORA" or config.alpha_pattern == before.alpha_pattern:
        return
    names = before.target_modules if isinstance(before.target_modules, set) else set[str]()
    moved = names - {*config.target_modules}
    patterns = [key for key in before.alpha_pattern if not names or any(name in key for name in moved)]
    odd = "use_rslora" if before.use_rslora else "alpha_pattern" if patterns else ""
    if odd:
        what = f"was written with transformers 4 over experts that are fused now, where its {odd} has another effect"
        raise ModelError(what, where="adapter", fix=f"with that release, {BY_PEFT}")


@contextmanager
def silenced() -> Iterator[None]:
    """In the block, `peft` gives no warnings that are `NOT_FOR_USERS`."""
    with warnings.catch_warnings():
        for message in NOT_FOR_USERS:
            warnings.filterwarnings("ignore", message)
        yield
