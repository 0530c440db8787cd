"""A causal language model in name only, whose parameters come into being in every way that code can think of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


class OddConfig(PreTrainedConfig):
    model_type = "odd"
    way: str = "plain"
    tie_word_embeddings: bool = False


class OddModel(PreTrainedModel):
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
