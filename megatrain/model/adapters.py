"""Adapters (LoRA and its relatives, by `peft`) over a streamed model. The only module that imports `peft`, an
optional dependency.

`peft` inserts its layers in place (`q_proj` becomes a module that holds `base_layer`, `lora_A` and `lora_B`) and
leaves the model's own forward alone. So an adapted model is just a model with a frozen base and a trained adapter,
and ports know nothing of it. This module decides for which adapters that holds (`adapter_of`), and patches, in the
streamed copy, what a layer of `peft` does by other means than its parameters (`without_parametrize`).

`AdaptedSource` adds an adapter to a base that is never in memory as a whole: `peft` works on the structure, where
it finds zeros without memory in place of weights, or the weights of one module at a time if the adapter starts
from their values. The names, files and configuration of a saved adapter come from `peft` too
(`Adapter.file_names`, `Adapter.config_json`).
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from megatrain.errors import ConfigError, ModelError, first_line
from megatrain.model.architecture import plain_errors
from megatrain.model.hub import ADAPTER, located, model_named
from megatrain.model.pretrained import PretrainedSource
from megatrain.model.weight_sources import (
    InFiles,
    Masters,
    Progress,
    Source,
    in_files_of,
    listed,
    load_causal_lm,
    quiet,
)
from megatrain.system.paths import read_json, usable_path

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

FULL_PRECISION = "load it in bfloat16: a frozen base takes 2 bytes per parameter of host memory, not of the device's"
"""What to do instead of quantizing the base (QLoRA)."""


PREFIX = "base_model.model."
"""Prefix of every name in an adapter's file: the path of the model inside a `PeftModel`."""

NEEDS_NO_VALUES = ("LORA", "IA3", "LOHA", "LOKR")
"""Methods whose initial weights do not depend on those of the base."""

OF_THE_BASE = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga", "mica")
"""Values of `init_lora_weights` that need the base's weights or data, and may change the base."""

SAYS_NOTHING = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping")
"""Fields of a `PeftConfig` that do not affect the layers' code."""

DROPOUT = re.compile(r"\w*dropout")
"""Fields of a `PeftConfig` that hold a dropout rate."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The single adapter of a model: its name in the model (usually `default`) and its `PeftConfig`."""

    name: str
    config: Any

    @property
    def drops(self) -> bool:
        """Whether it uses dropout."""
        return any(value for name, value in vars(self.config).items() if DROPOUT.fullmatch(name))

    @property
    def facts(self) -> str:
        """Everything that its layers' code depends on, as text."""
        fields = {name: sorted(each) if isinstance(each, set) else each for name, each in vars(self.config).items()}
        for name in SAYS_NOTHING:
            fields.pop(name, None)
        return f"peft {version('peft')} {json.dumps(fields, sort_keys=True, default=str)}"

    def file_names(self, whole: PreTrainedModel) -> dict[str, str]:
        """Name in the model -> name in `peft`'s file, for every saved tensor; `whole` may be on the meta device."""
        from peft import get_peft_model_state_dict

        state = whole.state_dict()
        names = {id(value): name for name, value in state.items()}
        saved = get_peft_model_state_dict(whole, state, self.name, save_embedding_layers=False)
        return {names[id(value)]: f"{PREFIX}{name}" for name, value in saved.items()}

    @property
    def config_json(self) -> bytes:
        """The adapter_config.json that `peft` would write for inference."""
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            return (Path(folder) / ADAPTER).read_bytes()

    def file_in(self, folder: Path, whole: PreTrainedModel) -> AdapterFile:
        """The saved weights of such an adapter, as a source. Raises `ModelError` if the folder holds another
        adapter's."""
        return AdapterFile(folder, self.file_names(whole))

    def refuse_more(self, model: PreTrainedModel) -> None:
        """Raise `ModelError` if parameters train that the adapter's file cannot hold: no checkpoint would contain
        them."""
        held = self.file_names(model)
        if more := [name for name, each in model.named_parameters() if each.requires_grad and name not in held]:
            what = f"{listed(more)} train too, and the adapter's file has no place for them"
            fix = "freeze them (requires_grad_(False)), or name their modules in modules_to_save"
            raise ModelError(what, where=f"model {type(model).__name__}", fix=fix)

    def put_into(self, model: nn.Module, *, drops: bool = True) -> None:
        """Add a trainable copy of this adapter to a model without one; `drops=False` removes its dropout.

        Raises `ModelError` if the model lacks the modules that it adapts.
        """
        from peft import inject_adapter_in_model

        config = copy.deepcopy(self.config)
        config.inference_mode = False
        if not drops:
            for name in filter(DROPOUT.fullmatch, vars(config)):
                setattr(config, name, 0.0)
        with plain_errors(f"model {type(model).__name__}"):
            inject_adapter_in_model(config, model, self.name)


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model inside a `PeftModel`, including the adapter's layers; any other model is returned as it
    is.

    Raises `ModelError` for anything but layers inserted into a model: prompt and prefix methods, and mixed adapters.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    if isinstance(model, peft.PeftMixedModel):
        raise ModelError("mixes adapters of several methods", where="model PeftMixedModel", fix="give it one adapter")
    for config in model.peft_config.values():
        refuse_method(config)
    base: nn.Module = model.get_base_model()
    return base


def refuse_method(config: Any) -> None:
    """Raise `ModelError` if this method of `peft` cannot stream."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    activated = method in METHODS and getattr(config, "alora_invocation_tokens", None)
    compressed = method in METHODS and getattr(config, "velora_config", None)
    if method in METHODS and not activated and not compressed:
        return
    why = WHY_NOT.get(method, "has not been compared with plain PyTorch here")
    if getattr(config, "is_prompt_learning", False):
        why = "adds learned tokens to the text or the cache, outside the layers"
    if compressed:
        method, why = "VeLoRA", "keeps an average over its first batch and has its own backward"
    if activated:
        method, why = "aLoRA", "starts after tokens that are searched for outside the layers"
    raise ModelError(f"{method} {why}, so it cannot stream", where="adapter", fix="use LoRA, say (peft.LoraConfig)")


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter in a transformers model, or `None`.

    Raises `ModelError` for several adapters, for one that is merged, disabled or inactive, and for a method that
    cannot stream.
    """
    tuned = list(_tuned(model))
    if not tuned:
        return None
    where = f"model {type(model).__name__}"
    if getattr(model, "quantization_method", None) is not None:
        raise ModelError("its base is quantized (QLoRA)", where=where, fix=FULL_PRECISION)
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if len(configs) != 1:
        what = f"has {len(configs)} adapters ({', '.join(configs)})"
        raise ModelError(what, where=where, fix="keep one (delete_adapter): only one can be trained")
    ((name, config),) = configs.items()
    refuse_method(config)
    for module in tuned:
        if getattr(module, "merged", False):
            raise ModelError("its adapter is merged into the base", where=where, fix="call unmerge_adapter() first")
        if module.disable_adapters:
            raise ModelError("its adapter is disabled", where=where, fix="call enable_adapter_layers() first")
        if list(module.active_adapters) != [name]:
            raise ModelError(f"its adapter {name} is not active", where=where, fix=f"call set_adapter({name!r}) first")
    return Adapter(name, config)


def _tuned(model: nn.Module) -> Iterator[Any]:
    """The modules that `peft` has inserted into a model."""
    if "peft" in sys.modules:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        yield from (module for module in model.modules() if isinstance(module, kinds))


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """In the block, the modules that `peft` has inserted behave like those of the base."""
    modules = [module for module in _tuned(model) if not module._disable_adapters]
    for module in modules:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in modules:
            module._disable_adapters = False


def without_parametrize(model: nn.Module) -> None:
    """Make layers that adapt a bare parameter, such as fused experts, substitute the adapted parameter on each call.

    `peft` does this with `torch.nn.utils.parametrize`, which registers parameters and so changes the module while
    `torch.func.functional_call` runs it. The arithmetic remains `peft`'s.
    """
    for module in _tuned(model):
        if hasattr(module, "_activate_lora"):
            module._activate_lora = MethodType(_adapted, module)


@contextmanager
def _adapted(self: Any, active_adapters: list[str]) -> Iterator[None]:
    """In the block, the parameter that the wrapper adapts has its adapted value."""
    layer, name = self.get_base_layer(), self.parameter_name
    weight = layer._parameters[name]
    (adapter,) = active_adapters
    if self.num_experts > 1:
        lhs, rhs, scaling = self.get_delta_factors(adapter)
        layer._parameters[name] = torch.baddbmm(weight, lhs, rhs, alpha=scaling)
    else:
        layer._parameters[name] = weight + self.get_delta_weight(adapter)
    try:
        yield
    finally:
        layer._parameters[name] = weight


# An adapter over a base that is not in memory -------------------------------------------------------------------------


class AdaptedSource:
    """A source with an adapter added to its structure. The adapter is in memory, the base stays where it is."""

    def __init__(
        self, base: Source, adapter: Any, seed: int = 0, *, name: str = "", trains: bool = True, has_values: bool = True
    ) -> None:
        """adapter: a `PeftConfig`, for a fresh adapter as `get_peft_model` makes it after `torch.manual_seed(seed)`,
        or the folder of one that `peft` has saved. name: the base's name, recorded in saved adapters. has_values: if
        false, the adapter is only a structure on the meta device.

        Raises `ModelError` for a method that cannot stream, for an initialisation that needs more of the base than
        one module at a time, and for a folder without an adapter for this model; `ConfigError` if `peft` is not
        installed.
        """
        require_peft()
        from peft import PeftConfig

        self.base, self.base_name = base, name
        self.model: PreTrainedModel = copy.deepcopy(base.model)
        named = {id(parameter): name for name, parameter in base_names(base.model, self.model)}
        folder = None if isinstance(adapter, PeftConfig) else usable_path(adapter, where="adapter", error=ModelError)
        config = copy.deepcopy(adapter) if folder is None else read_adapter_config(folder)
        refuse_method(config)
        if getattr(config, "target_modules", None) == "auto":
            config.target_modules = _without_experts(config, _linear(base.model), base.model)
        config.inference_mode = not trains
        config.task_type = config.task_type or "CAUSAL_LM"
        config.base_model_name_or_path = config.base_model_name_or_path or name or None
        values = None if folder is not None or not _begins_from_values(config) or not has_values else _reader(base)
        device = torch.device("cpu" if has_values else "meta")
        with torch.random.fork_rng(devices=[]), device, quiet(), _pefts_errors():
            torch.default_generator.manual_seed(seed)
            _inject(self.model, config, named if has_values else {}, values)
            self._biases = {} if folder is None else _load(self.model, folder, named)
        self._named = named
        self._names = {key: named[id(each)] for key, each in self.model.named_parameters() if id(each) in named}
        self._copies = dict(_copied(self.model))

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        """Write every parameter of every unit (see `Source`)."""
        of_base = [[self._names[name] for name in unit if name in self._names] for unit in units]
        ours = {theirs: name for name, theirs in self._names.items()}
        self.base.fill(_Under(masters, ours), of_base, progress)
        parameters = dict(self.model.named_parameters())
        for name in (name for unit in units for name in unit if name not in self._names):
            original = self._copies.get(name) if parameters[name].is_meta else None
            masters.write_master(name, parameters[name].detach() if original is None else masters.master(original))

    def in_files(self, names: Iterable[str], dtype: torch.dtype) -> InFiles:
        """As `PretrainedSource.in_files`, for the base's parameters; the adapter's are never read from files."""
        asked = {self._names[name]: name for name in names if name in self._names}
        found = in_files_of(self.base, asked, dtype)
        return InFiles(
            {asked[theirs]: where for theirs, where in found.files.items()},
            {asked[theirs]: why for theirs, why in found.others.items()},
        )

    def left_out(self) -> str:
        """Describes the contents of the base's files that the model does not use."""
        return self.base.left_out() if isinstance(self.base, PretrainedSource) else ""

    def merged(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some float32 parameters of the base, under its names, with the adapter merged into them as `peft` does.

        values: all parameters of one layer, or all outside the layers; may be overwritten. Raises `ModelError` if
        the merged model would no longer fit its class: a tied head of which only one side was trained.
        """
        found = dict(values)
        for module in _tuned(self.model):
            if not hasattr(module, "merge"):
                continue
            parameters = dict(module.get_base_layer().named_parameters())
            names = {key: self._named[id(each)] for key, each in parameters.items() if id(each) in self._named}
            if names and all(name in found for name in names.values()):
                for name in names.values():
                    self._refuse_tied(name)
                with _lent(module, self._named, lambda name, _: found[name]), torch.no_grad(), _pefts_errors():
                    module.merge()
                    for key, name in names.items():
                        found[name] = module.get_base_layer().get_parameter(key).data
        parameters = dict(self.model.named_parameters())
        found.update({theirs: parameters[name].detach() for name, theirs in self._biases.items() if theirs in found})
        for name, original in self._copies.items():
            if (theirs := self._names[original]) in found:
                self._refuse_tied(theirs)
                found[theirs] = parameters[name].detach()
        return found

    def _refuse_tied(self, name: str) -> None:
        parameter = self.base.model.get_parameter(name)
        every = [key for key, each in self.base.model.named_parameters(remove_duplicate=False) if each is parameter]
        if len(every) > 1:
            what = f"{every[0]} and {every[1]} are tied, but the adapter has trained only one of them"
            raise ModelError(what, where="adapter", fix="use it with its base, unmerged")


def pretrained_source(
    source: str | Path,
    adapter: Any = None,
    seed: int = 0,
    *,
    trains: bool = True,
    attention: str = "auto",
    trust_remote_code: bool = False,
    allow_unloaded: bool = True,
) -> PretrainedSource | AdaptedSource:
    """The weights of a folder or hub name, with an adapter over them if given (see `AdaptedSource`).

    If the source is an adapter's folder, the result is the base that it names, with that adapter. Without an adapter,
    raises `ModelError` for tensors of the files that are not loaded, unless they are allowed.
    """
    folder, where = model_named(source), f"adapter {source}"
    if (behind := model_behind(folder)) != folder:
        if adapter is not None:
            fix = "merge it first (megatrain export --merge), or give the base and one adapter"
            raise ModelError("is itself an adapter and cannot take another", where=where, fix=fix)
        source, adapter = behind, folder
    base = PretrainedSource(source, attention=attention, trust_remote_code=trust_remote_code)
    if adapter is None and not allow_unloaded:
        base.require_all_loaded("give allow_unloaded=True to do without, or an adapter")
    name = str(Path(source).resolve()) if Path(source).exists() else str(source)
    return base if adapter is None else AdaptedSource(base, adapter, seed, name=name, trains=trains)


class AdapterFile:
    """The weights of a saved adapter, to load into an engine with that base and adapter."""

    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        """names: see `Adapter.file_names`. Raises `ModelError` if the file holds other tensors."""
        from peft import load_peft_weights

        with _pefts_errors():
            held = load_peft_weights(str(folder), device="cpu")
        if held.keys() != {*names.values()}:
            odd = sorted(held.keys() ^ {*names.values()})
            raise ModelError(f"belongs to another adapter: only one of the two has {odd[0]}", where=f"adapter {folder}")
        self.values = {name: held[file] for name, file in names.items()}

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        """Write the file's tensors that belong to the units; the base is not changed."""
        for name in (name for unit in units for name in unit if name in self.values):
            masters.write_master(name, self.values[name])


def lora_config(
    r: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
    target_modules: Sequence[str] = ("auto",),
    modules_to_save: Sequence[str] = (),
    **more: Any,
) -> Any:
    """A `peft.LoraConfig` from the configuration keys of a run. Raises `ConfigError` if `peft` is not installed.

    target_modules: names, or `all-linear` (which includes fused experts and routers), or `auto` (which does not).
    """
    require_peft()
    from peft import LoraConfig

    targets: Any = list(target_modules)
    if len(targets) == 1 and targets[0] in ("auto", "all-linear"):
        targets = targets[0]
    whole = int(alpha) if alpha == int(alpha) else alpha
    made = LoraConfig(
        r=r, lora_alpha=whole, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM", **more
    )
    made.modules_to_save = list(modules_to_save) or None
    return made


def lora_named(text: str) -> dict[str, Any]:
    """The configuration keys for `lora`, `lora:16` or `lora:16:all-linear` on the command line. Raises
    `ConfigError`."""
    method, _, rest = text.partition(":")
    rank, _, targets = rest.partition(":")
    if method != "lora" or not (rank or "16").isdecimal() or not 0 < int(rank or 16) <= 1 << 16:
        raise ConfigError(
            f"{text[:40]!r} is not an adapter", where="--adapter", fix="give lora, lora:16 or lora:16:all-linear"
        )
    named = {"target_modules": tuple(targets.split(","))} if targets else {}
    return {"r": int(rank or 16), "alpha": 2.0 * int(rank or 16), **named}


def model_behind(source: str) -> str:
    """The base model named by an adapter's folder; any other source is returned as it is."""
    folder = Path(source)
    is_adapter = (folder / ADAPTER).is_file() and not (folder / "config.json").exists()
    return base_named_in(folder, f"adapter {source}") if is_adapter else source


def load_trained(folder: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a saved model as any user would: with `from_pretrained`, plus `PeftModel` for an adapter."""
    base = load_causal_lm(model_behind(folder), dtype=dtype, trust_remote_code=trust_remote_code)
    if model_behind(folder) == folder:
        return base
    from peft import PeftModel

    with quiet(), _pefts_errors():
        whole = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).get_base_model()
        loaded: PreTrainedModel = whole.to(dtype)
    return loaded


def with_adapter(structure: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Add a fresh adapter to a structure on the meta device, for a plan: its values are meaningless."""
    return AdaptedSource(_Structure(structure), config, has_values=False).model


@dataclass(frozen=True, slots=True)
class _Structure:
    """A source without weights."""

    model: PreTrainedModel

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        raise NotImplementedError


def require_peft() -> None:
    """Raise `ConfigError` if `peft` is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        what, fix = "adapters need the library peft", 'pip install "megatrain[adapters]"'
        raise ConfigError(what, where="adapter", fix=fix) from error


def read_adapter_config(folder: Path) -> Any:
    """The `PeftConfig` in a folder written by `peft` or an engine. Raises `ModelError` if there is none."""
    from peft import PeftConfig

    if not (folder / ADAPTER).is_file():
        fix = "give a folder with adapter_config.json and adapter_model.safetensors"
        raise ModelError("holds no adapter", where=f"adapter {folder}", fix=fix)
    with _pefts_errors():
        return PeftConfig.from_pretrained(str(folder))


def base_named_in(folder: Path, where: str) -> str:
    """The base model named by an adapter's folder. Raises `ModelError` if it names none, or one that cannot be
    found."""
    try:
        name = read_json(folder / ADAPTER).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"its {ADAPTER} cannot be read", where=where, fix="copy or download it again") from error
    if not name:
        raise ModelError(
            f"its {ADAPTER} names no base", where=where, fix="give the base, and the folder as its adapter"
        )
    return located(str(name), where=f"base of {where}")


def base_names(before: nn.Module, after: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in `before`, parameter of `after`) for two copies of one model."""
    return zip((name for name, _ in before.named_parameters()), after.parameters(), strict=True)


def _linear(model: PreTrainedModel) -> set[str]:
    """Last name components of a model's linear layers, except its head and fused experts."""
    kinds, head = (nn.Linear, Conv1D), model.get_output_embeddings()
    found = {name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head}
    return {name.rpartition(".")[2] for name in found}


def _without_experts(config: Any, names: set[str], model: PreTrainedModel) -> set[str]:
    """`names` without those that `peft` would take to mean fused experts (those of a shared expert's layers, say)."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # this release does not adapt fused experts
        return names
    found = copy.deepcopy(config)
    found.target_modules = set(names)
    convert_peft_config_for_transformers(found, model=model, conversions=None)
    return set(found.target_modules)


def _begins_from_values(config: Any) -> bool:
    """Whether an adapter's initial weights depend on the base's. Raises `ModelError` if making them changes the
    base."""
    start = getattr(config, "init_lora_weights", True)
    odd = f"init_lora_weights={start!r}" if isinstance(start, str) and start.lower().startswith(OF_THE_BASE) else ""
    odd = "kasa_config" if getattr(config, "kasa_config", None) else odd
    odd = "trainable_token_indices" if getattr(config, "trainable_token_indices", None) else odd
    if odd:
        what = f"{odd} needs or changes the weights of the whole base"
        fix = "leave it out, or build the model in memory (peft.get_peft_model) and pass it to Engine.from_model"
        raise ModelError(what, where="adapter", fix=fix)
    return config.peft_type.value not in NEEDS_NO_VALUES or bool(getattr(config, "use_dora", False))


def _reader(base: Source) -> Any:
    """A function that reads one parameter of the base. Raises `ModelError` if the base has no values yet."""
    read = getattr(base, "read", None)
    if read is None:
        what = "it starts from the weights of the base, and a fresh model has none yet"
        raise ModelError(what, where="adapter", fix="use plain LoRA, or start from a folder of weights")
    return read


def _inject(model: PreTrainedModel, config: Any, named: Mapping[int, str], read: Any) -> None:
    """Have `peft` insert its layers into a model on the meta device, lending values to each module while `peft`
    looks at it."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]

    class Lending(tuner):  # type: ignore[misc]
        def _create_and_replace(self, config: Any, name: str, target: nn.Module, *args: Any, **kwargs: Any) -> None:
            with _lent(target, named, read):
                super()._create_and_replace(config, name, target, *args, **kwargs)

    Lending(model, config, adapter_name="default")


@contextmanager
def _lent(target: nn.Module, named: Mapping[int, str], read: Any) -> Iterator[None]:
    """In the block, a meta module's parameters are in memory: as their values, or as zeros that take no memory."""
    before = [(module, dict(module._parameters)) for module in target.modules()]
    for module, parameters in before:
        for key, parameter in parameters.items():
            if parameter is not None and parameter.is_meta and id(parameter) in named:
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                value = zeros if read is None else read(named[id(parameter)], torch.float32)
                module._parameters[key] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)


def _load(model: PreTrainedModel, folder: Path, named: Mapping[int, str]) -> dict[str, str]:
    """Load the weights of a saved adapter into the layers that exist. Raises `ModelError` if they do not fit.

    Returns name -> name without the adapter, for parameters of the base that were saved with it (biases).
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and id(parameter) not in named:
                module._parameters[key] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
    read = load_peft_weights(str(folder), device="cpu")
    values = {name.removeprefix(PREFIX): value for name, value in read.items()}
    biases: dict[str, str] = {}
    for name, parameter in list(model.named_parameters()):
        if name in values:
            biases[name] = named[id(parameter)]
            owner, _, key = name.rpartition(".")
            trained = nn.Parameter(values[name].to(parameter.dtype), requires_grad=parameter.requires_grad)
            model.get_submodule(owner)._parameters[key] = trained
    ours = {name for name, parameter in model.named_parameters() if id(parameter) not in named}
    found = set_peft_model_state_dict(model, values, "default")
    where = f"adapter {folder}"
    if missing := sorted(ours & {*found.missing_keys}):
        raise ModelError(f"its file lacks {listed(missing)}", where=where, fix="use files that belong together")
    if found.unexpected_keys:
        what = f"the model does not have its {listed(sorted(found.unexpected_keys))}"
        raise ModelError(what, where=where, fix="use it with the base that it was trained on")
    return biases


def _copied(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, name in the base) of parameters in modules that train as a whole (`modules_to_save`)."""
    from peft.utils.other import ModulesToSaveWrapper

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copied in module.modules_to_save.values():
                for key, parameter in copied.named_parameters():
                    yield names[id(parameter)], names[id(module.original_module.get_parameter(key))]


@contextmanager
def _pefts_errors() -> Iterator[None]:
    """Turn errors that `peft` raises about a configuration or a file into `ModelError`s of one line."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError, OSError, AttributeError) as error:
        fix = "set target_modules to names of the model's linear layers, or all-linear, and see the docs of peft"
        raise ModelError(first_line(error), where="adapter", fix=fix) from error


class _Under:
    """The masters, addressed by the names that the base's parameters have without the adapter."""

    def __init__(self, masters: Masters, ours: Mapping[str, str]) -> None:
        self._masters, self._ours = masters, ours

    def master(self, name: str) -> Tensor:
        return self._masters.master(self._ours[name])

    def write_master(self, name: str, value: Tensor) -> None:
        if name in self._ours:  # else the adapter has a value for it
            self._masters.write_master(self._ours[name], value)
