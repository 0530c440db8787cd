"""A model given by name equals that of `from_pretrained`; its parameters are read when they are first used."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.errors import ConfigError, ModelError
from megatrain.hf.model import LazyParameter, named_model
from tests.tiny import tiny_model


def folder(tmp_path: Path, family: str = "llama") -> str:
    tiny_model(family).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def by_name(name: str, **given: Any) -> PreTrainedModel:
    return named_model(name, SimpleNamespace(model_init_kwargs=given, trust_remote_code=False))


@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_equals_from_pretrained(tmp_path: Path, family: str, dtype: str) -> None:
    name = folder(tmp_path, family)
    found, expected = by_name(name, dtype=dtype), AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    assert (found.config.to_dict(), found.training) == (expected.config.to_dict(), expected.training)
    for which in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(found, which)()), dict(getattr(expected, which)())
        assert mine.keys() == theirs.keys()
        for each, value in theirs.items():
            assert (mine[each].dtype, mine[each].requires_grad) == (value.dtype, value.requires_grad)
            assert torch.equal(mine[each], value)


@pytest.mark.parametrize("asked", ["auto", torch.float32, None])
def test_dtype_arguments_match_from_pretrained(tmp_path: Path, asked: Any) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert by_name(str(tmp_path), dtype=asked).dtype == (torch.bfloat16 if asked == "auto" else torch.float32)


@pytest.mark.parametrize(
    "given",
    [
        {"device_map": "auto"},
        {"device_map": {"": 0}, "low_cpu_mem_usage": True, "max_memory": {0: "1GB"}},
        {"attn_implementation": None, "revision": None, "quantization_config": None, "trust_remote_code": None},
        {"revision": "main", "use_safetensors": True},
    ],
)
def test_arguments_without_effect_are_accepted(tmp_path: Path, given: dict[str, Any]) -> None:
    assert by_name(folder(tmp_path), **given).config.to_dict() == by_name(folder(tmp_path)).config.to_dict()


def test_config_fields_given_as_arguments_are_set(tmp_path: Path) -> None:
    given = {"use_cache": False, "attention_dropout": 0.25, "attn_implementation": "eager"}
    found = by_name(folder(tmp_path), **given)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, **given)
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.model.layers[0].self_attn.attention_dropout == 0.25
    assert found.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "a device_map of several devices is not supported"),
        ({"dtype": "bflot16"}, "dtype='bflot16' is not a torch dtype"),
        ({"dtype": torch.float16}, "weights in float16"),
        ({"use_safetensors": False}, "use_safetensors=False is not supported"),
        ({"atention_dropout": 0.1}, "atention_dropout is neither a field of its config.*did you mean 'attention_dropo"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config is neither a field"),
        ({"attn_implementation": "flash_attention_9"}, "cannot use attention=flash_attention_9"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(tmp_path: Path, given: dict[str, Any], what: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=what):
        by_name(folder(tmp_path), **given)


def test_a_revision_of_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two revisions in the local cache, and a missing one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--somebody--something"
    (repository / "refs").mkdir(parents=True)
    for number, branch in enumerate(("main", "earlier")):
        tiny_model(seed=number).save_pretrained(repository / "snapshots" / (f"{number}" * 40))
        (repository / "refs" / branch).write_text(f"{number}" * 40)
    for number, revision in ((0, None), (0, "main"), (1, "earlier"), (1, "1" * 40)):
        weight = by_name("somebody/something", revision=revision).lm_head.weight
        assert torch.equal(weight, tiny_model(seed=number).lm_head.weight)
    with pytest.raises(ModelError, match="neither a local folder nor in the local cache at revision later"):
        by_name("somebody/something", revision="later")


# Lazy parameters ---------------------------------------------------------------------------------------------------


VALUE = torch.arange(6.0).view(2, 3)


def lazy(reads: list[int]) -> LazyParameter:
    def read() -> Tensor:
        reads.append(1)
        return VALUE.clone()

    return LazyParameter.of(nn.Parameter(torch.empty(2, 3, device="meta")), torch.float32, read)


def test_metadata_access_reads_no_weights() -> None:
    reads: list[int] = []
    parameter, module = lazy(reads), nn.Linear(3, 2, bias=False)
    module.weight = parameter
    module.requires_grad_(False).zero_grad()
    parameter.requires_grad = True
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.size(0), len(parameter), parameter.ndim) == ((2, 3), 2, 2, 2)
    assert (parameter.numel(), parameter.dtype, parameter.device.type, parameter.nbytes) == (
        6,
        torch.float32,
        "cpu",
        24,
    )
    assert (parameter.is_meta, parameter.requires_grad, parameter.grad, parameter.is_leaf) == (False, True, None, True)
    assert parameter.is_floating_point()
    assert torch.is_floating_point(parameter)
    assert "values have not been read" in repr(parameter)
    torch.optim.SGD(module.parameters(), 0.1)
    assert [id(each) for each in module.parameters()] == [id(parameter)]
    assert reads == []
    assert isinstance(parameter, LazyParameter)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.clone(),
        lambda p: p.detach(),
        lambda p: p.data,
        lambda p: p.T.T,
        lambda p: p[:],
        lambda p: p + 0,
        lambda p: torch.stack([p])[0],
        lambda p: torch.cat([torch.zeros(0, 3), p]),
        lambda p: nn.functional.linear(torch.eye(3), p).T,
        lambda p: torch.tensor(p.tolist()),
        lambda p: torch.from_numpy(p.detach().numpy()),
        lambda p: copy.deepcopy(p),
        lambda p: pickle.loads(pickle.dumps(p)),
    ],
)
def test_first_use_of_values_reads_them_once(use: Callable[[Any], Tensor]) -> None:
    reads: list[int] = []
    parameter = lazy(reads)
    with torch.inference_mode():
        first = use(parameter)
    assert torch.equal(first, VALUE)
    assert torch.equal(use(parameter), VALUE)
    assert reads == [1]
    assert type(parameter) is nn.Parameter
    assert not parameter.is_inference()
    assert parameter.requires_grad


def test_written_values_persist() -> None:
    added, assigned, filled = lazy([]), lazy(reads := []), lazy([])
    added.data.add_(1)
    assigned.data = VALUE + 2
    with torch.no_grad():
        filled.fill_(3)
    assert torch.equal(added, VALUE + 1)
    assert torch.equal(assigned, VALUE + 2)
    assert torch.equal(filled, torch.full((2, 3), 3.0))
    assert reads == []  # values that are replaced need not be read


def test_parameters_are_offloaded_and_keep_their_identity() -> None:
    module = nn.Linear(3, 2)
    weight = module.weight
    weight.grad = torch.ones(2, 3)
    LazyParameter.make_lazy(weight, lambda: VALUE.clone())
    assert isinstance(weight, LazyParameter)
    assert weight is module.weight
    assert torch.equal(module(torch.eye(3)) - module.bias, VALUE.T)
    assert type(weight) is nn.Parameter
    assert torch.equal(weight.grad, torch.ones(2, 3))
