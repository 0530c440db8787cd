"""Puts adapters (LoRA and its relatives, by `peft`) over a streamed model; the only module that imports `peft`.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import GENERATION_CONFIG_NAME

from megatrain.errors import ConfigError, ModelError, first_line
from megatrain.model.adapter_methods import (
    begins_from_values,
    changes_base,
    refuse_absent_modules,
    refuse_method,
    refuse_rescaled,
    refuse_start,
    silenced,
)
from megatrain.model.architecture import head_of, plain_errors
from megatrain.model.freeze import decoder_of
from megatrain.model.hub import ADAPTER, cached_folder, model_behind, model_named, named_adapter
from megatrain.model.pretrained import PretrainedSource
from megatrain.model.weight_sources import (
    InFiles,
    Masters,
    Progress,
    RenamedMasters,
    Source,
    in_files_of,
    listed,
    load_causal_lm,
    quiet,
)
from megatrain.system.paths import read_json, usable_path

FULL_PRECISION = "load it in bfloat16: a frozen base takes 2 bytes per parameter of host memory, not of the device's"
"""What to do instead of quantizing the base (QLoRA)."""


UNMERGED = "use it with its base, unmerged"
COPY_AGAIN = "copy or download it again, or load it with the release of peft that wrote it"
TARGETS = "set target_modules to names of the model's linear layers, or all-linear, and see the docs of peft"
OTHER_BASE = "use it with the base that it was trained over"
REFUSED = "peft refuses this setting over this model: change it, and see the docs of peft"

PREFIX = "base_model.model."
"""Prefix of every name in an adapter's file: the path of the model inside a `PeftModel`."""

SAYS_NOTHING = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping")
"""Fields of a `PeftConfig` that do not affect the layers' code."""

DROPOUT = re.compile(r"\w*dropout")
"""Fields of a `PeftConfig` that hold a dropout rate."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The single adapter of a model: its name in the model (usually `default`) and its `PeftConfig`."""

    name: str
    config: Any
    is_resized: bool = False
    """Whether the vocabulary has other rows than its base's files: the embeddings are then saved with the adapter."""

    @property
    def drops(self) -> bool:
        """Whether it uses dropout."""
        return any(value for name, value in vars(self.config).items() if DROPOUT.fullmatch(name))

    @property
    def facts(self) -> str:
        """Everything that its layers' code depends on, as text."""
        fields = {name: sorted(value) if isinstance(value, set) else value for name, value in vars(self.config).items()}
        for name in SAYS_NOTHING:
            fields.pop(name, None)
        return f"peft {version('peft')} {json.dumps(fields, sort_keys=True, default=str)}"

    def file_names(self, whole: PreTrainedModel) -> dict[str, str]:
        """Name in `peft`'s file -> name in the model, for every saved tensor; `whole` may be on the meta device.

        A parameter of several modules (a tied copy of the embedding, say) is in the file once for each. Frozen weights
        of the base are in it where `peft` saves them too: embeddings that are adapted or resized.
        """
        from peft import get_peft_model_state_dict

        names = {id(tensor): name for name, tensor in (*whole.named_buffers(), *whole.named_parameters())}
        state, configs = whole.state_dict(keep_vars=True), whole.peft_config
        # without a name of the base, for which peft would ask the hub whether the vocabulary has been resized
        whole.peft_config = {self.name: replaced_fields(self.config, base_model_name_or_path=None)}
        try:
            with quiet():
                saved = get_peft_model_state_dict(
                    whole, state, self.name, save_embedding_layers=self.is_resized or "auto"
                )
        finally:
            whole.peft_config = configs
        if self.is_resized:  # peft leaves one out if only the other is adapted
            ends = {id(parameter) for end in _ends(whole) for parameter in end.parameters()}
            ends -= {id(value) for value in saved.values()}
            saved |= {name: value for name, value in state.items() if id(value) in ends}
        return {f"{PREFIX}{name}": names[id(value)] for name, value in saved.items()}

    @property
    def config_json(self) -> bytes:
        """The adapter_config.json that `peft` would write for inference."""
        config = replaced_fields(self.config, inference_mode=True)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            return (Path(folder) / ADAPTER).read_bytes()

    def file_in(self, folder: Path, whole: PreTrainedModel) -> AdapterFile:
        """The saved weights of such an adapter, as a source. Raises `ModelError` if the folder holds another
        adapter's."""
        frozen = {name for name, parameter in whole.named_parameters() if not parameter.requires_grad}
        names = self.file_names(whole)
        return AdapterFile(folder, names, {*names.values()} - frozen)

    def refuse_more(self, model: PreTrainedModel) -> None:
        """Raise `ModelError` if parameters train that the adapter's file cannot hold: no checkpoint would contain
        them."""
        held = {*self.file_names(model).values()}
        if more := [name for name, param in model.named_parameters() if param.requires_grad and name not in held]:
            what = f"{listed(more)} train too, and the adapter's file has no place for them"
            fix = "freeze them (requires_grad_(False)), or name their modules in modules_to_save"
            raise ModelError(what, where=f"model {type(model).__name__}", fix=fix)

    def put_into(self, model: nn.Module, *, drops: bool = True) -> None:
        """Add a trainable copy of this adapter to a model without one; `drops=False` removes its dropout.

        Raises `ModelError` if the model lacks the modules that it adapts.
        """
        from peft import inject_adapter_in_model

        config = replaced_fields(self.config, inference_mode=False)
        if not drops:
            for name in filter(DROPOUT.fullmatch, vars(config)):
                setattr(config, name, 0.0)
        with plain_errors(f"model {type(model).__name__}"), silenced():
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
    return Adapter(name, config, _is_resized(model, config))


def _is_resized(model: Any, config: Any) -> bool:
    """Whether a model's vocabulary has another size than its base's files say, if they are on this machine."""
    name = getattr(config, "base_model_name_or_path", None) or ""
    folder = Path(name) if name and (Path(name) / "config.json").is_file() else None
    if folder is None and (not name or (folder := cached_folder(name)) is None):
        return False
    with quiet(), plain_errors(f"base of the adapter {name}"):
        of_files = getattr(type(model.config).from_pretrained(str(folder)), "vocab_size", None)
    return of_files is not None and of_files != getattr(model.config, "vocab_size", of_files)


def _ends(model: Any) -> list[nn.Module]:
    """The input and the output embeddings, with what `peft` has put around them."""
    return [end for end in (model.get_input_embeddings(), head_of(model)) if end is not None]


def replaced_fields(config: Any, **fields: Any) -> Any:
    """A copy of a `PeftConfig` with some fields changed."""
    copied = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


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


def _take_stops(folder: Path, *models: PreTrainedModel) -> None:
    """Let `models` stop generating where an adapter in `folder` has been trained to, if that is written there."""
    try:
        stops = read_json(folder / GENERATION_CONFIG_NAME).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return
    for model in models:
        if stops is not None and model.generation_config is not None:
            model.generation_config.eos_token_id = stops


class AdaptedSource:
    """A source with an adapter added to its structure. The adapter is in memory, the base stays where it is."""

    def __init__(self, base: Source, adapter: Any, seed: int = 0, *, name: str = "", trains: bool = True) -> None:
        """adapter: a `PeftConfig`, for a fresh adapter as `get_peft_model` makes it after `torch.manual_seed(seed)`,
        or the folder of one that `peft` has saved. name: the base's name, recorded in saved adapters.

        Raises `ModelError` for a method that cannot stream, for an initialisation that needs more of the base than
        one module at a time, and for a folder without an adapter for this model; `ConfigError` if `peft` is not
        installed.
        """
        require_peft()
        from peft import PeftConfig

        self.base, self.base_name = base, name
        self.model: PreTrainedModel = copy.deepcopy(base.model)
        folder = None if isinstance(adapter, PeftConfig) else usable_path(adapter, where="adapter", error=ModelError)
        if folder is not None:
            _take_stops(folder, base.model, self.model)
        given = adapter if folder is None else read_adapter_config(folder)
        config = self.config = _aimed(given, base.model, is_fresh=folder is None)
        saved = {} if folder is None else _saved_values(folder)
        _resize(self.model, saved)
        self._paths = {id(module): path for path, module in self.model.named_modules()}
        """id of a module of the base -> its name in the base, wherever `peft` has put it."""
        names = (name for name, _ in base.model.named_parameters())
        named = {id(parameter): name for name, parameter in zip(names, self.model.parameters(), strict=True)}
        config.inference_mode = not trains
        config.base_model_name_or_path = name or config.base_model_name_or_path
        values = _reader(base) if begins_from_values(config, is_saved=folder is not None) else None
        rows = _reader(base) if folder is None and getattr(config, "trainable_token_indices", None) else None
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), quiet(), _pefts_errors():
            torch.default_generator.manual_seed(seed)
            with _lent_ends(self.model, config, named, rows):
                _inject(self.model, config, named, values)
            if folder is not None:
                refuse_rescaled(given, config)
            self._changes = dict(_changes(self.model, named)) if values and changes_base(config) else {}
            self._biases = {} if folder is None else _load(self.model, folder, saved, base, named)
        _zero_meta_buffers(self.model)
        self._named = named
        self._names = {key: named[id(param)] for key, param in self.model.named_parameters() if id(param) in named}
        self._copies = dict(_copied(self.model))

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        of_base = [[self._names[name] for name in unit if name in self._names] for unit in units]
        ours = {theirs: [name] for name, theirs in self._names.items()}  # for others the adapter has a value
        self.base.fill(RenamedMasters(masters, ours, self.changed), of_base, progress)
        parameters = dict(self.model.named_parameters())
        for name in (name for unit in units for name in unit if name not in self._names):
            original = self._copies.get(name) if parameters[name].is_meta else None
            masters.write_master(name, parameters[name].detach() if original is None else masters.master(original))

    def in_files(self, names: Iterable[str], dtype: torch.dtype) -> InFiles:
        """Which of these parameters exist byte for byte in the base's files in `dtype`, and why the others do not.

        Those of the adapter are never read from files.
        """
        asked = {self._names[name]: name for name in names if name in self._names}
        of_base = in_files_of(self.base, asked.keys() - self._changes.keys(), dtype)
        changed = {name: "is changed by how the adapter begins" for name in asked.keys() & self._changes.keys()}
        return InFiles(
            {asked[theirs]: where for theirs, where in of_base.files.items()},
            {asked[theirs]: why for theirs, why in {**of_base.others, **changed}.items()},
        )

    def changed(self, name: str, value: Tensor) -> Tensor:
        """A parameter of the base as the adapter expects it: as saved with the adapter, or changed by how that began.

        name: in the base. value: of the base; may be overwritten.
        """
        if (ours := self._biases.get(name)) is not None:
            return self.model.get_parameter(ours).detach()
        return self._changes[name](value) if name in self._changes else value

    def left_out(self) -> str:
        """Describes the contents of the base's files that the model does not use."""
        return self.base.left_out() if isinstance(self.base, PretrainedSource) else ""

    def dequantized(self) -> str:
        """Describes the weights that the base's files hold quantized; empty if there are none."""
        return self.base.dequantized() if isinstance(self.base, PretrainedSource) else ""

    @property
    def layers(self) -> list[tuple[str, Any]]:
        """(name of a module in the base, layer of `peft` over it), the inner one first where there are two."""
        over = [module for module in _tuned(self.model) if hasattr(module, "merge")]
        return [(self._paths[id(module.get_base_layer())], module) for module in reversed(over)]

    @property
    def wholes(self) -> dict[str, Tensor]:
        """Name in the base -> value in the adapter, for parameters of modules that train as a whole."""
        return {
            f"{self._paths[id(original)]}.{key}": parameter.detach()
            for original, copied in _wholes(self.model)
            for key, parameter in copied.named_parameters(remove_duplicate=False)
        }


def pretrained_source(
    source: str | Path,
    adapter: Any = None,
    seed: int = 0,
    *,
    trains: bool = True,
    attention: str = "auto",
    trust_remote_code: bool = False,
    base: str | None = None,
) -> PretrainedSource | AdaptedSource:
    """The weights of a folder or hub name, with an adapter over them if given (see `AdaptedSource`).

    If the source is an adapter's folder, the result is `base`, or else the base that it names, with that adapter.
    """
    folder, where = model_named(source), f"adapter {source}"
    if (behind := model_behind(folder, base)) != folder:
        if adapter is not None:
            fix = "merge it first (megatrain export --merge), or give the base and one adapter"
            raise ModelError("is itself an adapter and cannot take another", where=where, fix=fix)
        source, adapter = behind, folder
    whole = PretrainedSource(source, attention=attention, trust_remote_code=trust_remote_code)
    name = str(Path(source).resolve()) if Path(source).exists() else str(source)
    return whole if adapter is None else AdaptedSource(whole, adapter, seed, name=name, trains=trains)


class AdapterFile:
    """The weights of a saved adapter, to load into an engine with that base and adapter."""

    def __init__(self, folder: Path, names: Mapping[str, str], trained: Collection[str]) -> None:
        """names: see `Adapter.file_names`. trained: those of them that the file must have; others are of the base.
        Raises `ModelError` if the file holds other tensors."""
        from peft import load_peft_weights

        with _pefts_errors(COPY_AGAIN):
            held = load_peft_weights(str(folder), device="cpu")
        of_adapter = {file: name for file, name in names.items() if name in trained}
        if odd := sorted((held.keys() - names.keys()) | (of_adapter.keys() - held.keys())):
            raise ModelError(f"belongs to another adapter: only one of the two has {odd[0]}", where=f"adapter {folder}")
        self.values = {name: held[file] for file, name in of_adapter.items()}

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
    trainable_token_indices: Sequence[int] = (),
    **more: Any,
) -> Any:
    """A `peft.LoraConfig` from the configuration keys of a run. Raises `ConfigError` if `peft` is not installed.

    target_modules: names, or `all-linear` (which includes fused experts, routers and encoders of images), or `auto`
    (which does not).
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
    made.trainable_token_indices = list(trainable_token_indices) or None
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


def load_trained(folder: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a saved model as any user would: with `from_pretrained`, plus `PeftModel` for an adapter."""
    base = load_causal_lm(model_behind(folder), dtype=dtype, trust_remote_code=trust_remote_code)
    if model_behind(folder) == folder:
        return base
    from peft import PeftModel

    with quiet(), _pefts_errors(COPY_AGAIN):
        whole = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).get_base_model()
        loaded: PreTrainedModel = whole.to(dtype)
    return loaded


def with_adapter(structure: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Add a fresh adapter to a structure on the meta device, for a plan: its values are meaningless."""
    require_peft()
    model = copy.deepcopy(structure)
    with torch.device("meta"), quiet(), _pefts_errors():
        _inject(model, _aimed(config, structure, is_fresh=True), {}, None)
    _zero_meta_buffers(model)
    return model


def _aimed(config: Any, model: PreTrainedModel, *, is_fresh: bool) -> Any:
    """A copy of a `PeftConfig` that names the modules of `model` which `auto` stands for.

    Raises `ModelError` for a method that cannot stream, and for a fresh adapter of modules that the model lacks.
    """
    refuse_method(config)
    if is_fresh:
        refuse_absent_modules(config, [path for path, _ in model.named_modules()])
    aimed = copy.deepcopy(config)
    aimed.task_type = aimed.task_type or "CAUSAL_LM"
    if getattr(aimed, "target_modules", None) == "auto":
        decoder = decoder_of(model)
        aimed.target_modules = _without_experts(aimed, _linear(model, decoder), model)
        if decoder is not None and not aimed.exclude_modules:
            aimed.exclude_modules = rf"(?!{re.escape(decoder)}\.).*"
    return aimed


def _zero_meta_buffers(model: nn.Module) -> None:
    """Replace buffers on the meta device by zeros: rows of tokens before training, which only unmerging reads."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype)


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
        fix = named_adapter(folder) or "give a folder with adapter_config.json and adapter_model.safetensors"
        raise ModelError("holds no adapter", where=f"adapter {folder}", fix=fix)
    with _pefts_errors(COPY_AGAIN):
        refuse_start(read_json(folder / ADAPTER).get("init_lora_weights"))  # some of which peft cannot even read
        return PeftConfig.from_pretrained(str(folder))


def _linear(model: PreTrainedModel, within: str | None) -> set[str]:
    """Last name components of the linear layers of a model, or of its module `within`, but not its head or experts."""
    kinds, head = (nn.Linear, Conv1D), head_of(model)
    names = {name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head}
    return {name.rpartition(".")[2] for name in names if within is None or name.startswith(f"{within}.")}


def _without_experts(config: Any, names: set[str], model: PreTrainedModel) -> set[str]:
    """`names` without those that `peft` would take to mean fused experts (those of a shared expert's layers, say)."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    tried = copy.deepcopy(config)
    tried.target_modules = set(names)
    convert_peft_config_for_transformers(tried, model=model, conversions=None)
    return set(tried.target_modules)


def _changes(model: PreTrainedModel, named: Mapping[int, str]) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """(name in the base, what the adapter's fresh weights have taken from it) for every parameter that they change."""
    for module in _tuned(model):
        for key, down in getattr(module, "lora_A", {}).items():
            up = module.scaling[key] * module.lora_B[key].weight.detach()
            yield (
                named[id(module.get_base_layer().weight)],
                partial(_less, up, down.weight.detach().clone(), turned=module.fan_in_fan_out),
            )


def _less(up: Tensor, down: Tensor, value: Tensor, *, turned: bool) -> Tensor:
    """A float32 weight without the part that two matrices have taken over. turned: it is stored (in, out)."""
    return value.to(torch.float32) - ((up @ down).T if turned else up @ down)


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
def _lent_ends(model: PreTrainedModel, config: Any, named: Mapping[int, str], read: Any) -> Iterator[None]:
    """In the block, the embeddings of which single rows will train have their values, if `read` is given."""
    asked = getattr(config, "trainable_token_indices", None) if read is not None else None
    ends = [module for name, module in model.named_modules() if isinstance(asked, dict) and name.endswith(tuple(asked))]
    with ExitStack() as lent:
        for module in ends or ([model.get_input_embeddings()] if asked else []):
            lent.enter_context(_lent(module, named, read))
        yield


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
            for key, parameter in parameters.items():
                if parameter is not None:  # `peft` freezes the base
                    lent = module._parameters[key]
                    parameter.requires_grad_(lent is not None and lent.requires_grad)
            module._parameters.update(parameters)


def _saved_values(folder: Path) -> dict[str, Tensor]:
    """The tensors of a saved adapter, named as in the model but for the adapter's name."""
    from peft import load_peft_weights

    with _pefts_errors(COPY_AGAIN):
        read = load_peft_weights(str(folder), device="cpu")
    return {name.removeprefix(PREFIX): value for name, value in read.items()}


def _resize(model: Any, saved: Mapping[str, Tensor]) -> None:
    """Give the embeddings of a structure as many rows as those saved with an adapter have, if any are."""
    names = [name for name, module in model.named_modules() if module in _ends(model)]
    within = ("", "base_layer.", "original_module.", "token_adapter.base_layer.")
    rows = {len(saved[key]) for name in names for inner in within if (key := f"{name}.{inner}weight") in saved}
    if rows and rows != {len(model.get_input_embeddings().weight)}:
        with quiet(), _pefts_errors():
            model.resize_token_embeddings(max(rows), mean_resizing=False)


def _load(
    model: PreTrainedModel, folder: Path, values: Mapping[str, Tensor], base: Source, named: Mapping[int, str]
) -> dict[str, str]:
    """Load the values of a saved adapter into the layers that exist. Raises `ModelError` if they do not fit.

    Returns name without the adapter -> name, for parameters of the base that were saved with it and are not as in the
    base: trained biases, and resized embeddings.
    """
    from peft import set_peft_model_state_dict

    made: dict[nn.Parameter, nn.Parameter] = {}  # one for all places of a tied parameter
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and id(parameter) not in named:
                if parameter not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[key] = made[parameter]
    of_base = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in named}
    biases = _replace_changed(model, values, base, named)
    ours = {name for name, parameter in model.named_parameters() if id(parameter) not in named}
    of_adapter = {name: value for name, value in values.items() if name not in of_base}
    loaded = set_peft_model_state_dict(model, of_adapter, "default")
    where = f"adapter {folder}"
    if missing := sorted((ours & {*loaded.missing_keys}) - {*biases.values()}):
        raise ModelError(f"its file lacks {listed(missing)}", where=where, fix="use files that belong together")
    twice = (".modules_to_save.weight", ".token_adapter.trainable_tokens_delta")  # of an embedding saved too
    if odd := sorted(name for name in loaded.unexpected_keys if not name.endswith(twice)):
        what = f"the model does not have its {listed(odd)}"
        raise ModelError(what, where=where, fix=OTHER_BASE)
    shapes = {name: parameter.shape for name, parameter in base.model.named_parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in named and parameter.shape != shapes[named[id(parameter)]]:
            fix = "use its base with the vocabulary resized, saved as a model, and an adapter trained over that"
            raise ModelError(f"its vocabulary was resized, and its file lacks {name}", where=where, fix=fix)
    return biases


def _replace_changed(
    model: PreTrainedModel, values: Mapping[str, Tensor], base: Source, named: Mapping[int, str]
) -> dict[str, str]:
    """Put saved values of the base's parameters into a model, except those that the base's own files hold.

    Returns name without the adapter -> name, of those that differ.
    """
    read, biases = getattr(base, "read", None), {}
    shapes = {name: tensor.shape for name, tensor in base.model.named_parameters()}
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in values and id(parameter) in named and id(parameter) not in made:
            value, original = values[name], named[id(parameter)]
            if read is not None and value.shape == shapes[original]:
                both = zip(read(original, torch.float32).split(4096), value.split(4096), strict=True)
                if all(torch.equal(ours, theirs.float()) for ours, theirs in both):
                    continue
            biases[original] = firsts[id(parameter)]
            made[id(parameter)] = nn.Parameter(value.to(parameter.dtype), requires_grad=parameter.requires_grad)
    for module in model.modules():
        for key, held in module._parameters.items():
            if held is not None and id(held) in made:
                module._parameters[key] = made[id(held)]
    return biases


def merge_layer(path: str, module: Any, values: dict[str, Tensor]) -> None:
    """Have `peft` merge a layer into the parameters of its base layer, replacing them in `values`.

    path: of the base layer (see `AdaptedSource.layers`). values: float32, by name in the base; may be overwritten.
    """
    layer = module.get_base_layer()
    before = dict(layer._parameters)
    lent = {key: nn.Parameter(values[name]) for key in before if (name := f"{path}.{key}") in values}
    layer._parameters.update(lent)
    try:
        with torch.no_grad(), _pefts_errors(UNMERGED):
            module.merge()  # which for LN tuning is an exchange of layers
            values.update({f"{path}.{key}": module.get_base_layer().get_parameter(key).data for key in lent})
    finally:
        layer._parameters.update(before)


def _wholes(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(the base's module, the copy that trains in its place) for `modules_to_save`."""
    from peft.utils.other import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield from ((module.original_module, copied) for copied in module.modules_to_save.values())


def _copied(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, name in the base) of parameters in modules that train as a whole (`modules_to_save`)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for original, copied in _wholes(model):
        for key, parameter in copied.named_parameters():
            yield names[id(parameter)], names[id(original.get_parameter(key))]


@contextmanager
def _pefts_errors(fix: str = "") -> Iterator[None]:
    """Turn errors that `peft` raises into `ModelError`s of one line. fix: what to do about them; by default it depends
    on what they say of a configuration."""
    try:
        with silenced():
            yield
    except (ValueError, TypeError, LookupError, RuntimeError, OSError, AttributeError, ImportError) as error:
        said = first_line(error)
        usual = OTHER_BASE if "size mismatch" in said else TARGETS if "arget" in said else REFUSED
        raise ModelError(said, where="adapter", fix=fix or usual) from error
