"""Parameters with learning rates of their own train as PyTorch's groups of parameters do, wherever they are updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.checkpoint.folder import open_checkpoint
from megatrain.errors import ConfigError
from megatrain.spec import Numerics, Placement
from megatrain.train.restore import optimizer_in
from tests.integration.test_ranks import batches_of
from tests.integration.test_ranks import trained as ranks_trained
from tests.tiny import batch, equal, relative_error, tiny_model, unequal_batches

RATES = (("*embed_tokens*", 1e-4), ("*.q_proj.*", 5e-2), ("*.1.*norm*", 2e-2))
"""Of a whole unit but for what pads it, of some of a layer, and of a parameter that does not decay."""
OPTIMIZER = AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, no_decay=("*norm*",), learning_rates=RATES)
RESIDENT, DISK = Placement("device", "device", "device"), Placement("disk", "disk", "disk", "disk")
SMALL = Policy(shard_nbytes=4096)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_param_groups_match_pytorch_with_a_scheduler(clip: float | None) -> None:
    """Each by its own peak, all by the same factor of it; weight decay goes by the rate of the group."""
    model, batches = tiny_model(), [batch(2, 9, 1)]
    named = list(model.named_parameters())
    rates = [OPTIMIZER.lr, *(rate for _, rate in RATES)]
    groups = [
        {"params": [p for n, p in named if (OPTIMIZER.group(n), OPTIMIZER.decays(n, p.shape)) == (group, decays)],
         "weight_decay": 0.1 if decays else 0.0, "peak": rate}
        for group, rate in enumerate(rates) for decays in (True, False)
    ]  # fmt: skip
    assert [len(group["params"]) for group in groups] == [19, 5, 1, 0, 3, 0, 0, 2]  # type: ignore[arg-type]
    stock = torch.optim.AdamW(groups, lr=1.0, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    with Engine.from_model(tiny_model(), "cpu", "fp32", OPTIMIZER, clip, SMALL_ON_CPU[clip], verify=False) as engine:
        for factor in (0.25, 0.5, 1.0, 0.5):
            for group in stock.param_groups:
                group["lr"] = group["peak"] * factor
            stock.zero_grad()
            model(**batches[0]).loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            stock.step()
            engine.step(batches, lr=1e-2 * factor)
        for name, value in engine.master_weights().items():
            assert relative_error(value, model.get_parameter(name)) < 1e-5, name


SMALL_ON_CPU = {
    clip: Policy(shares_memory=True, update="during_backward" if clip is None else "next_forward")
    for clip in (None, 0.5)
}


def trained(
    policy: Policy, device: str = "cpu", disk: Sequence[Path] = (), optimizer: AdamW = OPTIMIZER
) -> dict[str, Tensor]:
    clip = None if policy.update == "during_backward" else 0.5
    how = {"numerics": Numerics("bf16", loss_chunk_tokens=5), "verify": False}
    with Engine.from_model(tiny_model(), device, None, optimizer, clip, policy, disk=disk, **how) as engine:  # type: ignore[arg-type]
        for factor in (0.5, 1.0):
            engine.step(unequal_batches(2), lr=1e-2 * factor)
        return engine.master_weights()


@cache
def plainest(update: str) -> dict[str, Tensor]:
    return trained(Policy(update=update))  # type: ignore[arg-type]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("device", "policy"),
    [
        ("cpu", replace(SMALL, placements=(DISK,) * 5)),
        ("sim:1", replace(SMALL, placements=(RESIDENT,) * 5)),
        ("sim:2", replace(SMALL, placements=(RESIDENT, Placement(), DISK, RESIDENT, Placement()))),
        ("sim:3", replace(SMALL, streamed_updates=1.0)),
        ("sim:4", replace(SMALL, streamed_updates=1.0, update="during_backward")),
    ],
    ids=["disk", "resident", "mixed", "streamed", "streamed as gradients land"],
)
def test_the_place_of_an_update_changes_no_bit_with_param_groups(device: str, policy: Policy, tmp_path: Path) -> None:
    found = trained(policy, device, [tmp_path] if any(each.uses_disk for each in policy.placements) else ())
    assert equal(found, plainest(policy.update))


def test_param_groups_are_updated_alike_on_several_ranks() -> None:
    """Each of which owns a part of every shard, whatever group it is of."""
    model, batches = tiny_model(), batches_of(2)
    many, one = (ranks_trained(size, model, batches, steps=2, optimizer=OPTIMIZER) for size in (2, 1))
    assert equal(many.weights, one.weights)


def test_a_pattern_with_the_global_rate_changes_no_bit() -> None:
    alike = replace(OPTIMIZER, learning_rates=tuple((pattern, OPTIMIZER.lr) for pattern, _ in RATES))
    assert equal(trained(Policy(), optimizer=alike), trained(Policy(), optimizer=replace(OPTIMIZER, learning_rates=())))
    assert not equal(trained(Policy(), optimizer=alike), plainest("next_forward"))


@pytest.mark.parametrize(
    ("rates", "what"),
    [
        (
            (("*lm_haed*", 1e-5),),
            r"^learning_rates: no trained parameter matches '\*lm_haed\*'; names look like 'lm_head",
        ),
        ((("*", 1e-5), ("*q_proj*", 1e-5)), r"layers\.0\.self_attn\.q_proj\.weight matches both '\*' and '\*q_proj\*'"),
        ((("*embed*", 1e-5),), r"no trained parameter matches '\*embed\*', only frozen ones"),
    ],
)
def test_patterns_matching_nothing_or_overlapping_are_refused(rates: tuple[tuple[str, float], ...], what: str) -> None:
    model = tiny_model()
    model.model.embed_tokens.requires_grad_(False)
    with pytest.raises(ConfigError, match=what):
        Engine.from_model(model, optimizer=AdamW(learning_rates=rates), verify=False)


def test_rates_may_change_between_steps_and_patterns_may_not(tmp_path: Path) -> None:
    with Engine.from_model(tiny_model(), "cpu", "fp32", OPTIMIZER, verify=False) as engine:
        before = engine.weights["model.layers.0.self_attn.q_proj.weight"]
        engine.set_optimizer(replace(OPTIMIZER, learning_rates=tuple((pattern, 0.0) for pattern, _ in RATES)))
        engine.step([batch(2, 8, 0)])
        assert torch.equal(engine.weights["model.layers.0.self_attn.q_proj.weight"], before)
        assert engine.weights["lm_head.weight"].ne(tiny_model().lm_head.weight).any()
        with pytest.raises(ConfigError, match="other parameters would have their own learning rate"):
            engine.set_optimizer(replace(OPTIMIZER, learning_rates=RATES[:2]))
        engine.set_optimizer(OPTIMIZER)
        folder = engine.save(tmp_path).wait()
    assert optimizer_in(open_checkpoint(folder)) == OPTIMIZER
