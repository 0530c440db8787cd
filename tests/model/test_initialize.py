"""Fresh weights in the store are those of the library's own initialisation, bit for bit, without the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model import FreshSource, ModelSource, port_model
from megatrain.model.skeleton import blueprint
from tests.kinds import KINDS, TIED, stock_model, tiny_config
from tests.model.test_pretrained import Written


class OddConfig(PreTrainedConfig):
    model_type = "odd"
    way: str = "plain"
    tie_word_embeddings: bool = False


class OddModel(PreTrainedModel):
    """A causal language model in name only, whose parameters come into being in every way that code can think of."""

    config_class = OddConfig
    base_model_prefix = "model"
    built = 0

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        OddModel.built += 1
        self.first = nn.Linear(6, 4)
        getattr(self, f"_{config.way}")()
        self.last = nn.Linear(4, 6, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and hasattr(self, "later"):
            self.later()

    def _plain(self) -> None:
        pass

    def _transposed(self) -> None:
        self.w = nn.Parameter(torch.randn(20, 30).T)
        self.later = lambda: self.w.normal_()

    def _chunks(self) -> None:
        self.q, self.k, self.v = (nn.Parameter(part) for part in torch.randn(6, 4).chunk(3))
        self.left, self.right = (nn.Parameter(part) for part in torch.randn(20, 30).chunk(2, dim=1))

        def later() -> None:
            self.k.mul_(2)
            self.left.normal_()
            self.left.add_(self.right)

        self.later = later

    def _deepcopied(self) -> None:
        self.copies = nn.ModuleList(copy.deepcopy(self.first) for _ in range(3))
        self.later = lambda: self.copies[1].weight.add_(1)

    def _data(self) -> None:
        self.w = nn.Parameter(torch.ones(5, 4))
        self.w.data = self.w.data * 2
        self.u = nn.Parameter(torch.ones(5, 4))
        self.u.data.uniform_()
        self.later = lambda: self.w.data[1:3].normal_()

    def _direct(self) -> None:
        self._parameters["w"] = nn.Parameter(torch.randn(4))

    def _lists(self) -> None:
        self.several = nn.ParameterList(torch.randn(3) for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(2)), "b": nn.Parameter(torch.zeros(0))})

    def _from_others(self) -> None:
        self.w = nn.Parameter(self.first.weight.clone())
        self.mean = nn.Parameter(self.first.weight.mean(0))

        def later() -> None:
            self.w.copy_(self.first.weight + 3 * self.w)
            self.mean.fill_(self.first.weight.abs().max().item())
            torch.mul(self.first.weight, 2, out=self.w)

        self.later = later

    def _initialisers(self) -> None:
        for name, shape in {"a": (6, 4), "b": (4, 4), "c": (3, 3, 2), "d": (8, 8), "e": (40, 9)}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

        def later() -> None:
            nn.init.orthogonal_(self.a)
            nn.init.eye_(self.b)
            nn.init.dirac_(self.c)
            nn.init.sparse_(self.d, 0.5)
            nn.init.trunc_normal_(self.e, std=0.02)

        self.later = later

    def _views(self) -> None:
        self.w = nn.Parameter(torch.randn(30, 20))

        def later() -> None:
            self.first.weight.normal_()
            rows, turned, flat = self.w[2:9], self.w.t(), self.w.view(-1)
            self.first.weight.zero_()
            rows.zero_()
            turned[3].uniform_()
            flat[100:200].fill_(1.5)

        self.later = later

    def _half(self) -> None:
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))
        self.later = lambda: self.w.add_(1)

    def _shared(self) -> None:
        self.w = nn.Parameter(torch.randn(4))
        self.same = self.w
        self.later = lambda: self.same.mul_(3)

    def _overlapping(self) -> None:
        self.w = nn.Parameter(torch.randn(4))
        self.also = nn.Parameter(self.w.data)

    def _replaced(self) -> None:
        self.w = nn.Parameter(torch.randn(4))
        self.first = nn.Linear(3, 3)
        self.w = nn.Parameter(torch.randn(5))

    def _untouched(self) -> None:
        self.w = nn.Parameter(torch.empty(1000))

    def _behind(self) -> None:
        w = torch.zeros(4)
        self.w = nn.Parameter(w)
        w.normal_()

    def _random_buffer(self) -> None:
        self.register_buffer("noise", torch.randn(4))

    def _unstable(self) -> None:
        for index in range(OddModel.built % 5):
            setattr(self, f"w{index}", nn.Parameter(torch.zeros(2)))

    def get_input_embeddings(self) -> Any:
        return self.first

    def forward(self, *_: Any, labels: Any = None) -> None:
        raise NotImplementedError


AutoConfig.register("odd", OddConfig, exist_ok=True)
AutoModelForCausalLM.register(OddConfig, OddModel, exist_ok=True)


def fill(source: FreshSource | ModelSource) -> Written:
    masters = Written()
    names = [name for name, _ in source.model.named_parameters()]
    told: list[tuple[int, int]] = []
    source.fill(masters, [names[::2], names[1::2]], lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    assert {total for _, total in told} == {told[-1][1]}
    return masters


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize(("kind", "tied"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in TIED)])
def test_every_family_initialises_bit_equal_to_stock(kind: str, tied: bool) -> None:
    config = tiny_config(kind, tie_word_embeddings=tied)
    source = FreshSource(config, 7)
    random = torch.get_rng_state()
    masters = fill(source)
    assert torch.equal(torch.get_rng_state(), random)
    stock = {name: parameter.detach() for name, parameter in stock_model(config, 7).named_parameters()}
    assert masters.keys() == stock.keys()
    assert [name for name in stock if not same_bits(masters[name], stock[name])] == []
    assert all(parameter.is_meta for parameter in source.model.parameters())


WAYS = ["chunks", "data", "deepcopied", "direct", "from_others", "half", "initialisers", "lists", "plain", "replaced"]


@pytest.mark.parametrize("way", [*WAYS, "shared", "transposed", "views"])
def test_every_way_of_creating_parameters_is_supported(way: str) -> None:
    config = OddConfig(way=way)
    masters = fill(FreshSource(config, 3))
    stock = {name: parameter.detach().float() for name, parameter in stock_model(config, 3).named_parameters()}
    assert masters.keys() == stock.keys()
    assert [name for name in stock if not same_bits(masters[name], stock[name].contiguous())] == []


def test_parameters_the_library_leaves_uninitialised_are_zero() -> None:
    assert not fill(FreshSource(OddConfig(way="untouched"), 0))["w"].any()


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("behind", "writes to a parameter"),
        ("overlapping", "also shares memory with w"),
        ("random_buffer", "buffer noise is drawn at random"),
        ("unstable", "same way twice"),
    ],
)
def test_initialisation_that_cannot_match_is_refused(way: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        fill(FreshSource(OddConfig(way=way), 0))


def test_initialisation_depends_only_on_the_seed() -> None:
    one, same, other = (fill(FreshSource({"model_type": "gpt2", **KINDS["gpt2"]}, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])


def test_unassigned_parameters_are_written_and_missing_ones_reported() -> None:
    masters = Written()
    with pytest.raises(ModelError, match=r"no value for a\.b, x\.y"):
        FreshSource(tiny_config("llama"), 0).fill(masters, [["x.y"], ["a.b", "lm_head.weight"]])
    assert "lm_head.weight" in masters


def test_parameters_have_memory_only_while_initialised() -> None:
    """Measured in a model that is wide enough: 16 layers' weights of a MiB, of which a handful is resident."""
    config = tiny_config("llama", hidden_size=512, intermediate_size=512, num_hidden_layers=16, head_dim=128)
    source = FreshSource(config, 0)
    seen: list[int] = []

    class Counting(Written):
        def write_master(self, name: str, value: Tensor) -> None:
            self[name] = torch.zeros(())  # nothing is kept
            if value.nbytes == 1 << 20:
                seen.append(_resident_nbytes())

    source.fill(Counting(), [])
    assert len(seen) > 150, "5 weights, 16 layers, twice"
    assert max(seen) - seen[0] < 16 << 20, "of 80 MiB"


def _resident_nbytes() -> int:
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral"])
def test_a_lazy_model_can_be_split_into_units(kind: str) -> None:
    config = tiny_config(kind)
    spec, stock = (
        port_model(model, torch.float32).structure for model in (FreshSource(config, 0).model, stock_model(config, 0))
    )
    assert spec.units == stock.units


def test_a_model_in_memory_is_a_weight_source() -> None:
    model = stock_model(tiny_config("llama", tie_word_embeddings=True), 0)
    masters = fill(ModelSource(model))
    assert masters.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(masters[name], parameter) for name, parameter in model.named_parameters())


def test_a_meta_model_is_not_a_weight_source() -> None:
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has no value"):
        ModelSource(blueprint(tiny_config("llama")))
