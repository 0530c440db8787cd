"""A parameter without a gradient in a step is left as `torch.optim.AdamW` leaves it: no decay, no moments, no count.

Wherever its state is, every optimizer computes the same bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain import AdamW, Engine, Lion, Muon, Policy
from megatrain.config.keys import TrainSection
from megatrain.dist import World
from megatrain.errors import LossError
from megatrain.model import ModelSource, PretrainedSource
from megatrain.model.tiny import perturb
from megatrain.optim import Optimizer
from megatrain.spec import Numerics, Placement
from megatrain.train.parity import stock_loss
from tests.ranks import together, worlds
from tests.stock.image_models import image_batch, image_model, text_batch
from tests.tiny import batch, equal, relative_error, tiny_model

OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1, learning_rates=(("*extra*", 2e-2),))
LION = Lion(lr=1e-3, betas=(0.9, 0.97), weight_decay=0.1, no_decay=("*norm*",))
MUON = Muon(lr=1e-2, adamw=AdamW(lr=3e-3, weight_decay=0.1, learning_rates=(("*extra*", 2e-2),)))
each_optimizer = pytest.mark.parametrize("optimizer", [OPTIMIZER, LION, MUON], ids=lambda each: each.NAME)
LONG = 6
"""Length from which the parameters that are used at times are used."""
Step = list[dict[str, Tensor]]


class AtTimes(nn.Module):
    """A module with one more parameter, used for long rows only, one that is never used, and an MLP of no width, as
    with `num_shared_experts: 0`."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.extra, self.never = nn.Parameter(torch.linspace(-1, 1, width)), nn.Parameter(torch.ones(5, width))
        self.up, self.down = nn.Parameter(torch.empty(0, width)), nn.Parameter(torch.empty(width, 0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        out = out + functional.linear(functional.linear(out, self.up), self.down)
        return out + self.extra * 0.3 if x.shape[1] > LONG else out


def at_times() -> PreTrainedModel:
    """A model in which a parameter of each layer, and one beside the embedding, is used at times."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = AtTimes(layer.mlp, 32)
    model.model.embed_tokens = AtTimes(model.model.embed_tokens, 32)
    return model


def by_torch(model: nn.Module, steps: Sequence[Step], clip: float | None, lr: float = 1e-2) -> dict[str, Tensor]:
    """The weights that a plain loop leaves."""
    groups = [
        {"params": [p for n, p in model.named_parameters() if ("extra" in n) == extra], "lr": lr * (1 + extra)}
        for extra in (False, True)
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, weight_decay=0.1)
    for batches in steps:
        optimizer.zero_grad(set_to_none=True)
        targets = [int((each["labels"][:, 1:] != -100).sum()) for each in batches]
        for each, count in zip(batches, targets, strict=True):
            (stock_loss(model, each) * count / sum(targets)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def engine_of(
    model: nn.Module, device: str = "cpu", policy: Policy | None = None, clip: float | None = None, **more: Any
) -> Engine:
    policy = replace(policy or Policy(), update="during_backward" if clip is None else "next_forward")
    options = {"optimizer": OPTIMIZER, "max_grad_norm": clip, "policy": policy, "verify": False, **more}
    return Engine.from_model(model, device, numerics=Numerics("fp32", loss_chunk_tokens=5), **options)


def of_lengths(*lengths: int) -> Step:
    return [batch(1, length, seed=10 * place + length) for place, length in enumerate(lengths)]


STEPS: list[Step] = [of_lengths(*each) for each in ((4, 5), (4, 9), (9, 5), (5, 5), (8, 9), (5, 4))]
"""No long row, one in either micro-batch, none, two, none."""
IN_HOST, THERE = Placement(), Placement("device", "device", "device")
DISK = Placement(weights="disk", low_bits="disk", moments="disk")
SMALL = Policy(shard_nbytes=4096)
CASES: dict[str, tuple[str, Policy, float | None]] = {
    "cpu": ("cpu", Policy(shares_memory=True), None),
    "cpu, clipped": ("cpu", Policy(shares_memory=True), 0.5),
    "sim": ("sim:1", SMALL, None),
    "sim, clipped": ("sim:2", SMALL, 0.5),
    "streamed": ("sim:3", replace(SMALL, streamed_updates=1.0), None),
    "streamed, clipped": ("sim:4", replace(SMALL, streamed_updates=1.0), 0.5),
    "on the device": ("sim:5", replace(SMALL, placements=(THERE,) * 5), None),
    "on the device, clipped": ("sim:6", replace(SMALL, placements=(THERE, IN_HOST, THERE, THERE, THERE)), 0.5),
    "on the disk": ("sim:7", replace(SMALL, placements=(DISK,) * 5), None),
    "on the disk, clipped": ("sim:8", replace(SMALL, placements=(DISK,) * 5), 0.5),
}


def named(cases: Iterable[str], *fast: str) -> pytest.MarkDecorator:
    """A test for each case; those not named are slow."""
    return pytest.mark.parametrize(
        "case", [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in cases]
    )


@cache
def expected(clip: float | None) -> dict[str, Tensor]:
    return by_torch(at_times(), STEPS, clip)


def trained(
    case: str, folder: Path, optimizer: Optimizer = OPTIMIZER, device: str = "", steps: Sequence[Step] = STEPS
) -> dict[str, Tensor]:
    of_case, policy, clip = CASES[case]
    disk: Any = {"disk": [folder]} if "disk" in case else {}
    with engine_of(at_times(), device or of_case, policy, clip, optimizer=optimizer, **disk) as engine:
        for batches in steps:
            engine.step(batches)
        return engine.master_weights()


@cache
def plainest(clip: float | None, optimizer: Optimizer = OPTIMIZER) -> dict[str, Tensor]:
    return trained("cpu" if clip is None else "cpu, clipped", Path(), optimizer)


@named(["cpu", "cpu, clipped"], "cpu")
def test_parameters_used_at_times_are_updated_as_by_torch(case: str) -> None:
    """Each has its own count of updates, its own learning rate, and its gradients in some steps only."""
    found, start, wanted = plainest(CASES[case][2]), dict(at_times().named_parameters()), expected(CASES[case][2])
    for name, value in found.items():
        if "never" in name:
            assert torch.equal(value, start[name]), name
            assert torch.equal(wanted[name], start[name]), name
        assert relative_error(value, wanted[name]) < 2e-5, name


@pytest.mark.few(3)
@each_optimizer
@named([n for n in CASES if n[:3] != "cpu"], "on the disk, clipped", "streamed, clipped", "on the device, clipped")
def test_no_bit_depends_on_where_the_state_is(case: str, optimizer: Optimizer, tmp_path: Path) -> None:
    assert equal(trained(case, tmp_path, optimizer), plainest(CASES[case][2], optimizer))


@pytest.mark.gpu
@each_optimizer
def test_no_bit_depends_on_where_the_state_is_on_a_gpu(optimizer: Optimizer, tmp_path: Path) -> None:
    cases = ("sim, clipped", "streamed, clipped", "on the device, clipped")
    first, *others = (trained(case, tmp_path, optimizer, "cuda:0") for case in cases)
    assert all(equal(other, first) for other in others)


@each_optimizer
@named(CASES, "cpu, clipped")
def test_a_resumed_run_knows_optimizer_and_counts(case: str, optimizer: Optimizer, tmp_path: Path) -> None:
    device, policy, clip = CASES[case]
    (tmp_path / "disk").mkdir()
    disk: Any = {"disk": [tmp_path / "disk"]} if "disk" in case else {}
    with engine_of(at_times(), device, policy, clip, optimizer=optimizer, **disk) as engine:
        for batches in STEPS[:3]:
            engine.step(batches)
        folder = engine.save(tmp_path / "run").wait()
    how: Any = {"policy": engine.policy, "max_grad_norm": clip, "verify": False, "device": device, **disk}
    how["numerics"] = engine.numerics
    with Engine.from_checkpoint(folder, source=ModelSource(at_times()), **how) as engine:
        assert engine.optimizer == optimizer
        engine.step(STEPS[0])  # which is forgotten
        engine.restore(folder)
        for batches in STEPS[3:]:
            engine.step(batches)
        assert equal(engine.master_weights(), plainest(clip, optimizer))


def test_parameters_that_train_later_count_from_zero(tmp_path: Path) -> None:
    model, expected = tiny_model("llama"), tiny_model("llama")
    steps, settings = [of_lengths(5), of_lengths(7)], AdamW(lr=1e-2, eps=1e-5, weight_decay=0.1)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)
    for layer in (model.model.layers[0], expected.model.layers[0]):
        layer.requires_grad_(False)
    with engine_of(model, optimizer=settings) as engine:
        engine.step(steps[0])
        folder = engine.save(tmp_path / "run").wait()
    later: Any = {"source": PretrainedSource(folder), "new": "zero", "max_grad_norm": None, "verify": False}
    with Engine.from_checkpoint(folder, numerics=Numerics("fp32", loss_chunk_tokens=5), **later) as engine:
        engine.step(steps[1])
        found = engine.master_weights()
    for (each,), trains in zip(steps, (False, True), strict=True):
        expected.model.layers[0].requires_grad_(trains)
        optimizer.zero_grad(set_to_none=True)
        stock_loss(expected, each).backward()
        optimizer.step()
    for name, value in expected.named_parameters():
        assert relative_error(found[name], value) < 2e-5, name


def _fails(log_probs: Tensor, batch: Any) -> Tensor:
    raise ArithmeticError


@named([name for name in CASES if "clipped" in name], "sim, clipped")
def test_a_step_that_fails_counts_nothing_twice(case: str, tmp_path: Path) -> None:
    """Its own rows have other parameters without a gradient than the pending updates, some of which it applies."""
    device, policy, clip = CASES[case]
    (tmp_path / "disk").mkdir()
    disk: Any = {"disk": [tmp_path / "disk"]} if "disk" in case else {}
    with engine_of(at_times(), device, policy, clip, **disk) as engine:
        for number, batches in enumerate(STEPS):
            with pytest.raises(LossError, match="ArithmeticError"):
                engine.step(STEPS[number - 3], loss_fn=_fails)
            engine.step(batches)
        found = engine.master_weights()
    whole = trained(case, tmp_path / "disk")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


OF_RANKS: dict[str, tuple[str, Policy, float | None]] = {
    "clipped": ("cpu", SMALL, 0.5),
    "at once": ("sim:2", SMALL, None),
    "at once, shared": ("sim:3", replace(SMALL, delivery="shared"), None),
    "at once, on the device": ("sim:4", replace(SMALL, placements=(THERE,) * 5), None),
    "at once, streamed": ("sim:5", replace(SMALL, streamed_updates=1.0), None),
    "clipped, streamed": ("sim:6", replace(SMALL, streamed_updates=1.0), 0.5),
    "at once, by shard": ("sim:7", replace(SMALL, wait_for="shard"), None),
}


@named(OF_RANKS, "at once, on the device")
def test_a_gradient_on_any_rank_counts(case: str) -> None:
    device, policy, clip = OF_RANKS[case]
    model = at_times()

    def of_rank(world: World) -> dict[str, Tensor]:
        with engine_of(model, device, policy, clip, world=world) as engine:
            for batches in STEPS:
                engine.step(batches[world.rank :: world.size])
            assert any(version.missed for version in engine.parts.optimizer.versions)
            return engine.master_weights()

    one, *others = together(worlds(2, 1), of_rank)
    wanted, start = expected(clip), dict(model.named_parameters())
    for name, value in one.items():
        assert all(torch.equal(value, other[name]) for other in others), name
        assert relative_error(value, wanted[name]) < 2e-5, name
        assert "never" not in name or torch.equal(value, start[name]), name


def test_indexers_keep_their_values() -> None:
    """DeepSeek V3.2 chooses tokens by indexers, to which no gradient flows."""
    config = AutoConfig.for_model(
        "deepseek_v32",
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4, "index_topk": 4},
        **{"index_head_dim": 8, "index_n_heads": 2, "mlp_layer_types": ["dense", "sparse"]},
        **{"layer_types": ["indexed_attention"] * 2, "max_position_embeddings": 64},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    perturb(model, 0)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    steps = [[batch(1, 7, seed)] for seed in range(10)]
    with engine_of(model, optimizer=AdamW(lr=1e-2, weight_decay=0.1)) as engine:
        for batches in steps:
            engine.step(batches)
        found = engine.master_weights()
    wanted = by_torch(model, steps, None)
    idle = [name for name in wanted if torch.equal(wanted[name], start[name])]
    assert any("indexer" in name for name in idle)
    assert all(torch.equal(found[name], start[name]) for name in idle)
    assert all(not torch.equal(found[name], start[name]) for name in wanted.keys() - set(idle))


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:4", marks=pytest.mark.slow)])
def test_images_in_every_second_step(device: str) -> None:
    def steps() -> list[Step]:
        return [[text_batch(n), image_batch("llava", n) if n % 2 else text_batch(n + 50)] for n in range(6)]

    with engine_of(image_model("llava"), device, clip=0.5, optimizer=AdamW(lr=1e-3, weight_decay=0.1)) as engine:
        for batches in steps():
            engine.step(batches)
        found = engine.master_weights()
    wanted = by_torch(image_model("llava"), steps(), 0.5, lr=1e-3)
    noise = [name for name in wanted if name.endswith("vision_tower.encoder.layers.0.self_attn.k_proj.bias")]
    for name in wanted.keys() - set(noise):  # a gradient that is zero but for rounding has any sign
        assert relative_error(found[name], wanted[name]) < 2e-5, name


@pytest.mark.parametrize("kind", ["roberta-prelayernorm", "axk2", "gpt2", "longcat_flash"])
def test_by_default_matrices_decay_and_norms_do_not(kind: str) -> None:
    """Whatever their paths: an outer module's name has "norm" in it, or a norm's has not."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
    optimizer = AdamW(no_decay=TrainSection.model_fields["no_decay"].default)
    norms = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if re.search("(?i)norm$", type(module).__name__)
    }
    assert norms
    for name, parameter in model.named_parameters():
        expected = not (name in norms or name.endswith("bias"))
        assert optimizer.decays(name, parameter.shape) is expected, name
