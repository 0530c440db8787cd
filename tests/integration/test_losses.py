"""Custom losses equal plain autograd in loss and every gradient, and the full logits never exist."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from megatrain import Engine, Policy
from megatrain.engine.batch import shifted, targets_of
from megatrain.engine.chunked_loss import ChunkedHead, differentiate
from megatrain.errors import BatchError, ConfigError, LossError
from megatrain.losses import (
    DESIRABLE,
    DPO,
    KTO,
    ORPO,
    REFERENCE,
    LogitsLoss,
    LogProbLoss,
    SimPO,
    SmoothedCrossEntropy,
    target_mask,
    with_reference,
)
from megatrain.spec import Numerics
from tests.tiny import VOCAB, batch, relative_error, stock_gradients, tiny_model, unequal_batches

TOLERANCE = 1e-5
Batches = list[dict[str, Tensor]]


NUMERICS = Numerics("fp32", loss_chunk_tokens=7)


def policy_for(device: str = "cpu", **changes: Any) -> Policy:
    small = {"shares_memory": device == "cpu", "shard_nbytes": 4096}
    return Policy(**{**small, **changes})


def engine_of(model: PreTrainedModel, device: str = "cpu", **changes: Any) -> Engine:
    return Engine.from_model(
        model, device=device, numerics=NUMERICS, policy=policy_for(device, **changes), verify=False
    )


def stock_log_probs(model: PreTrainedModel, each: dict[str, Tensor]) -> Tensor:
    """float32[batch, length] at the positions of the labels, with a graph; 0 where there is no target."""
    inputs = {key: each[key] for key in ("input_ids", "attention_mask") if key in each}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    labels = each["labels"][:, 1:]
    found = functional.log_softmax(logits, dim=-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return functional.pad(torch.where(labels != -100, found, 0.0), (1, 0))


def by_autograd(model: PreTrainedModel, total: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = total()
    loss.backward()
    return loss.item(), {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    worst = max(expected, key=lambda name: relative_error(found[name], expected[name]))
    assert relative_error(found[worst], expected[worst]) < TOLERANCE, worst


def without_reference(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != REFERENCE}


def pairs(count: int, length: int, seed: int) -> dict[str, Tensor]:
    """`count` pairs with prompts of two tokens and answers of different lengths, padded on the right."""
    made = batch(2 * count, length, seed)
    ids, labels = made["input_ids"], made["labels"]
    mask = torch.ones_like(ids)
    for row in range(2 * count):
        size = length - row % 4
        if row % 2:
            ids[row, :2] = ids[row - 1, :2]
        labels[row, :2] = -100
        labels[row, size:] = -100
        mask[row, size:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "device"), [("llama", "cpu"), ("qwen3-tied", "sim:3"), ("gpt2", "cpu"), ("mixtral-balanced", "sim:4")]
)
def test_cross_entropy_as_a_loss_of_log_probabilities_is_cross_entropy(family: str, device: str) -> None:
    model, batches = tiny_model(family), unequal_batches(3)
    loss, expected = stock_gradients(model, batches)
    with engine_of(model, device, activations="recompute") as engine:
        minus_sum = lambda log_probs, _: -log_probs.sum()  # noqa: E731
        assert_same(engine.gradients(batches, loss_fn=minus_sum), expected)
        assert engine.measure(batches, minus_sum).loss == pytest.approx(loss, rel=TOLERANCE)
        assert engine.step(batches, loss_fn=minus_sum).loss == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 0.0, 2.0)])
def test_the_router_auxiliary_loss_weight_is_the_callers(weights: tuple[float, ...]) -> None:
    """It is also reported for each micro-batch, with the loss's own metrics."""
    model, batches = tiny_model("mixtral-balanced"), unequal_batches(3)
    tokens = sum(int(target_mask(each).sum()) for each in batches)
    routers = [model(**each, use_cache=False).aux_loss for each in batches]

    def total() -> Tensor:
        found = torch.zeros(())
        for each, weight in zip(batches, weights, strict=True):
            inputs = {name: value for name, value in each.items() if name != "labels"}
            aux = model(**inputs, use_cache=False).aux_loss
            found = found - stock_log_probs(model, each).sum() / tokens + 0.5 * weight * aux
        return found

    def counted(log_probs: Tensor, each: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -log_probs.sum(), {"said": log_probs.detach().sum()}

    loss, expected = by_autograd(model, total)
    with engine_of(model) as engine:
        assert engine.parts.ported.balance_coefficient == 0.5
        assert_same(engine.gradients(batches, router_weights=weights), expected)
        assert engine.measure(batches, router_weights=weights).loss == pytest.approx(loss, rel=TOLERANCE)
        out = engine.step(batches, loss_fn=counted, router_weights=weights)
        assert out.loss == pytest.approx(loss, rel=TOLERANCE)
        assert [each["aux_loss"] for each in out.by_micro_batch] == pytest.approx([each.item() for each in routers])
        counts = [int(target_mask(each).sum()) for each in batches]
        said = sum(each["said"] * count for each, count in zip(out.by_micro_batch, counts, strict=True))
        assert out.metrics == {"said": pytest.approx(said / tokens)}
        with pytest.raises(BatchError, match="2 router_weights for 3 micro-batches"):
            engine.step(batches, router_weights=(1.0, 1.0))


def test_log_probabilities_equal_the_stock_models_in_micro_batch_order() -> None:
    model, batches = tiny_model().eval(), unequal_batches(3)
    with engine_of(model) as engine, torch.no_grad():
        for found, each in zip(engine.log_probs(batches), batches, strict=True):
            torch.testing.assert_close(found, stock_log_probs(model, each), rtol=1e-5, atol=1e-6)
            assert torch.equal(found != 0, target_mask(each))


def stock_dpo(log_probs: Tensor, reference: Tensor, each: dict[str, Tensor], loss: DPO) -> tuple[Tensor, Tensor]:
    """A plain reference: losses and reward margins for each pair."""
    policy, base = log_probs.sum(1), reference.sum(1)
    counts = (each["labels"][:, 1:] != -100).sum(1)
    losses, margins = [], []
    for at in range(0, len(policy), 2):
        first, second = policy[at] - base[at], policy[at + 1] - base[at + 1]
        margins.append(loss.beta * (first - second))
        if loss.loss_type == "ipo":
            losses.append((first / counts[at] - second / counts[at + 1] - 1 / (2 * loss.beta)) ** 2)
        else:
            likely = torch.sigmoid(margins[-1])
            losses.append(-(1 - loss.label_smoothing) * likely.log() - loss.label_smoothing * torch.log(1 - likely))
    return torch.stack(losses), torch.stack(margins)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("loss", "family"),
    [(DPO(), "llama"), (DPO(0.5, 0.1), "qwen3-tied"), (DPO(0.3, loss_type="ipo"), "llama-tied")],
    ids=["sigmoid", "smooth", "ipo"],
)
def test_preference_steps_equal_a_plain_pytorch_loop(loss: DPO, family: str) -> None:
    """Loss, every gradient and the metrics, of a policy that differs from its reference."""
    plain, reference = tiny_model(family), tiny_model(family)
    batches = [pairs(2, 12, 0), pairs(1, 9, 1)]
    with torch.no_grad():
        base = [stock_log_probs(reference, each) for each in batches]

    def expected() -> tuple[float, dict[str, Tensor], Tensor]:
        margins: list[Tensor] = []

        def total() -> Tensor:
            found = [
                stock_dpo(stock_log_probs(plain, each), frozen, each, loss)
                for each, frozen in zip(batches, base, strict=True)
            ]
            margins.extend(each.detach() for _, each in found)
            return torch.cat([each for each, _ in found]).mean()

        return *by_autograd(plain, total), torch.cat(margins)

    with engine_of(tiny_model(family)) as engine:
        given = with_reference(batches, engine.log_probs(batches))
        for _ in range(3):
            plain.load_state_dict(engine.master_weights(), strict=False)
            wanted, gradients, margins = expected()
            assert_same(engine.gradients(given, loss_fn=loss), gradients)
            assert engine.measure(given, loss).loss == pytest.approx(wanted, rel=TOLERANCE)
            out = engine.step(given, lr=1e-2, loss_fn=loss)
            assert out.loss == pytest.approx(wanted, rel=TOLERANCE)
            assert out.metrics["rewards/margins"] == pytest.approx(margins.mean().item(), rel=1e-4, abs=1e-6)
            assert out.metrics["rewards/accuracies"] == pytest.approx((margins > 0).float().mean().item())
    assert out.metrics["rewards/margins"] > 0.01, "the policy must have moved"


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", [ORPO(), ORPO(0.4), SimPO(), SimPO(0.7, 0.2)], ids=str)
def test_steps_without_a_reference_equal_a_plain_pytorch_loop_around_trl(loss: ORPO | SimPO) -> None:
    """Loss and every gradient, by TRL's own functions over the stock model's log-probabilities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is experimental
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer

    plain = tiny_model()
    batches = [pairs(2, 12, 0), pairs(1, 9, 1)]
    as_trainer = SimpleNamespace(
        beta=loss.beta,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo",
        simpo_gamma=getattr(loss, "gamma", 0.0),
        label_smoothing=0.0,
        alpha=0.0,
    )

    def total() -> Tensor:
        found = []
        for each in batches:
            counts = (each["labels"][:, 1:] != -100).sum(1)
            means = stock_log_probs(plain, each).sum(1) / counts
            chosen, rejected = means[::2], means[1::2]
            if isinstance(loss, ORPO):
                ratios, *_ = ORPOTrainer.odds_ratio_loss(as_trainer, chosen, rejected)
                found.append(-chosen - ratios)
            else:
                found.append(CPOTrainer.cpo_loss(as_trainer, chosen, rejected)[0])
        return torch.cat(found).mean()

    with engine_of(tiny_model()) as engine:
        for _ in range(2):
            plain.load_state_dict(engine.master_weights(), strict=False)
            wanted, gradients = by_autograd(plain, total)
            assert_same(engine.gradients(batches, loss_fn=loss), gradients)
            out = engine.step(batches, lr=1e-2, loss_fn=loss)
            assert out.loss == pytest.approx(wanted, rel=TOLERANCE)
            told = out.metrics
            apart = told["rewards/chosen"] - told["rewards/rejected"]
            assert told["rewards/margins"] == pytest.approx(apart, abs=1e-5)


def test_orpo_log_odds_are_exact_at_both_ends() -> None:
    for value in (0.0, -1e-12, -1e-3, -0.6931, -0.6932, -5.0, -60.0):
        log_probs = torch.tensor([[value, value - 0.1]], dtype=torch.float64).reshape(2, 1).requires_grad_()
        batch: dict[str, object] = {"labels": torch.ones(2, 2, dtype=torch.int64)}
        loss, _ = ORPO()(torch.cat([torch.zeros(2, 1), log_probs], 1), batch)
        loss.backward()
        assert math.isfinite(loss.item())
        assert torch.isfinite(log_probs.grad).all()
        if -40 < value < 0:
            chosen, rejected = value, value - 0.1
            first, second = (math.exp(each) / -math.expm1(each) for each in (chosen, rejected))
            odds = math.log(first / second)
            assert loss.item() == pytest.approx(-chosen + 0.1 * math.log1p(math.exp(-odds)), rel=1e-9)


def test_micro_batching_of_pairs_changes_nothing() -> None:
    whole = pairs(3, 10, 5)
    parts = [{key: value[2 * n : 2 * n + 2] for key, value in whole.items()} for n in range(3)]
    with engine_of(tiny_model()) as engine:
        together, apart = (with_reference(each, engine.log_probs(each)) for each in ([whole], parts))
        engine.step(together, lr=1e-2, loss_fn=DPO())
        assert_same(engine.gradients(apart, loss_fn=DPO()), engine.gradients(together, loss_fn=DPO()))


def answers(count: int, length: int, seed: int) -> dict[str, Tensor]:
    """`count` answers, each before its mismatched one, with prompts of two tokens; every third one is bad."""
    made = pairs(count, length, seed)
    made[DESIRABLE] = torch.arange(2 * count) // 2 % 3 != 2
    return made


def trls_kto(log_probs: Tensor, reference: Tensor, each: dict[str, Tensor], loss: KTO) -> Tensor:
    """The loss of TRL's own trainer for a batch, given the log-probabilities of model and reference."""
    from trl import KTOTrainer

    rows, mismatched = slice(None, None, loss.rows), slice(1, None, 2)
    mask = target_mask(each)[rows]

    class Said(SimpleNamespace):
        def __call__(self, **_: Any) -> SimpleNamespace:
            said = log_probs[mismatched] if not torch.is_grad_enabled() else log_probs[rows]
            return SimpleNamespace(log_probs=said[:, 1:], entropy=said[:, 1:], mean_logits=said[:, 1:])

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, calculate_KL=loss.loss_type == "kto",
        aux_loss_enabled=False, precompute_ref_logps=True, loss_type=loss.loss_type, beta=loss.beta,
        desirable_weight=loss.desirable_weight, undesirable_weight=loss.undesirable_weight,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
    batch = {
        "input_ids": each["input_ids"][rows], "attention_mask": each["attention_mask"][rows], "completion_mask": mask,
        "label": each[DESIRABLE][rows], "ref_logps": reference.sum(1)[rows],
        "KL_input_ids": each["input_ids"][mismatched], "KL_attention_mask": each["attention_mask"][mismatched],
        "KL_completion_mask": target_mask(each)[mismatched], "ref_KL_logps": reference.sum(1)[mismatched],
    }  # fmt: skip
    found: Tensor = KTOTrainer._compute_loss(trainer, Said(), batch, return_outputs=False)
    each["told"] = {name: values[-1] for name, values in trainer._metrics["train"].items()}  # type: ignore[assignment]
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "loss", [KTO(), KTO(0.5, 0.7, 1.4), KTO(0.3, loss_type="apo_zero_unpaired")], ids=["kto", "weighted", "apo"]
)
def test_kto_losses_equal_trls(loss: KTO) -> None:
    """Loss, every gradient and the metrics; each micro-batch has its own KL term."""
    plain, reference = tiny_model(), tiny_model()
    batches = [answers(4, 12, 0), answers(4, 9, 1)]
    with torch.no_grad():
        base = [stock_log_probs(reference, each) for each in batches]

    def total() -> Tensor:
        found = [
            trls_kto(stock_log_probs(plain, each), frozen, each, loss)
            for each, frozen in zip(batches, base, strict=True)
        ]
        return torch.stack(found).mean()

    with engine_of(tiny_model()) as engine:
        asked = [{key: value for key, value in each.items() if key != DESIRABLE} for each in batches]
        given = [
            {**each, DESIRABLE: full[DESIRABLE]}
            for each, full in zip(with_reference(asked, engine.log_probs(asked)), batches, strict=True)
        ]
        engine.step(asked, lr=1e-2)  # whatever the answer, all are likelier than to the reference now
        for _ in range(2):
            plain.load_state_dict(engine.master_weights(), strict=False)
            wanted, gradients = by_autograd(plain, total)
            found = engine.gradients(given, loss_fn=loss)
            assert max(float((found[name] - gradients[name]).abs().max()) for name in gradients) < 1e-6
            assert_same(found, gradients)
            out = engine.step(given, lr=1e-3, loss_fn=loss)
            assert out.loss == pytest.approx(wanted, abs=1e-6)
            for said, each in zip(out.by_micro_batch, batches, strict=True):
                told = each.pop("told")
                names = ["rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"]
                for name in [*names, "kl"] if loss.loss_type == "kto" else names:
                    assert said[name] == pytest.approx(told[name], rel=1e-5, abs=1e-5)
    assert loss.loss_type != "kto" or out.metrics["kl"] > 1, "the policy must have moved away"


def test_ktos_kl_estimate_is_per_micro_batch_without_gradient() -> None:
    """It is a mean over each micro-batch, at least 0, so it depends on how answers are divided; mismatched rows have no
    gradient."""
    log_probs = torch.zeros(4, 3)
    log_probs[:, 1] = torch.tensor([-1.0, 3.0, -2.0, -9.0])
    batch = {"labels": torch.ones(4, 3, dtype=torch.int64), REFERENCE: torch.zeros(4),
             DESIRABLE: torch.tensor([True, False, False, True])}  # fmt: skip
    parts = [{key: value[at : at + 2] for key, value in batch.items()} for at in (0, 2)]
    leaf = log_probs.clone().requires_grad_()
    loss, told = KTO(1.0)(leaf, batch)
    loss.backward()
    assert told["kl"] == 0
    assert (leaf.grad[1::2] == 0).all()
    assert (leaf.grad[::2] != 0).any()
    assert loss.item() == pytest.approx(2 - sigmoid(-1.0) - sigmoid(2.0))
    kls = [KTO(1.0)(log_probs[at : at + 2], part)[1]["kl"] for at, part in zip((0, 2), parts, strict=True)]
    assert kls == [3.0, 0.0]
    with pytest.raises(BatchError, match="3 rows are not pairs of answers and mismatched ones"):
        KTO().divisor({key: value[:3] for key, value in batch.items()})
    with pytest.raises(BatchError, match=r"desirable has shape \[4, 1\] for 4 rows"):
        KTO().divisor({**batch, DESIRABLE: torch.ones(4, 1)})
    assert KTO(loss_type="apo_zero_unpaired").divisor({key: value[:3] for key, value in batch.items()}) == 3


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


class Distillation(LogitsLoss):
    """The divergence from a teacher's probabilities, which are in the micro-batch."""

    own = ("teacher",)

    def __call__(self, logits: Tensor, labels: Tensor, **own: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = functional.kl_div(functional.log_softmax(logits, -1), own["teacher"], reduction="sum")
        return loss, {"agrees": (logits.argmax(-1) == own["teacher"].argmax(-1)).sum()}


def test_logit_losses_get_their_tokens_entries() -> None:
    model, batches = tiny_model("qwen3-tied"), unequal_batches(2)
    for each in batches:
        each["teacher"] = torch.softmax(torch.randn(*each["labels"].shape, VOCAB), -1)

    def total() -> Tensor:
        losses = []
        for each in batches:
            inputs = {key: each[key] for key in ("input_ids", "attention_mask") if key in each}
            found = functional.log_softmax(model(**inputs, use_cache=False).logits[:, :-1], -1)
            mask = each["labels"][:, 1:] != -100
            losses.append(functional.kl_div(found[mask], each["teacher"][:, 1:][mask], reduction="sum"))
        return torch.stack(losses).sum() / sum(int(target_mask(each).sum()) for each in batches)

    loss, expected = by_autograd(model, total)
    with engine_of(model) as engine:
        assert_same(engine.gradients(batches, loss_fn=Distillation()), expected)
        out = engine.step(batches, loss_fn=Distillation())
    assert out.loss == pytest.approx(loss, rel=TOLERANCE)
    assert 0 <= out.metrics["agrees"] <= 1


def test_smoothed_cross_entropy_with_a_z_loss() -> None:
    model, batches = tiny_model(), unequal_batches(2)

    def total() -> Tensor:
        losses = []
        for each in batches:
            inputs = {key: each[key] for key in ("input_ids", "attention_mask") if key in each}
            logits, mask = model(**inputs, use_cache=False).logits[:, :-1], each["labels"][:, 1:] != -100
            wanted = each["labels"][:, 1:][mask]
            losses.append(functional.cross_entropy(logits[mask], wanted, reduction="sum", label_smoothing=0.2))
            losses.append(0.01 * logits[mask].logsumexp(-1).square().sum())
        return torch.stack(losses).sum() / sum(int(target_mask(each).sum()) for each in batches)

    loss, expected = by_autograd(model, total)
    with engine_of(model) as engine:
        assert_same(engine.gradients(batches, loss_fn=SmoothedCrossEntropy(0.2, 0.01)), expected)
        assert engine.measure(batches, SmoothedCrossEntropy(0.2, 0.01)).loss == pytest.approx(loss, rel=TOLERANCE)


def test_random_heads_draw_the_same_in_both_passes() -> None:
    weight, hidden = torch.randn(VOCAB, 16), torch.randn(12, 16)
    labels = torch.randint(0, VOCAB, (2, 6))
    each, targets = {"labels": labels}, shifted(labels).reshape(-1)

    def head(part: Tensor) -> Tensor:
        return functional.dropout(part, 0.5) @ weight.T

    def rewind() -> None:
        torch.manual_seed(3)

    rewind()
    leaf = hidden.clone().requires_grad_()
    losses = [
        functional.cross_entropy(head(leaf[places]), targets[places], reduction="sum").square()
        for places in (targets != -100).nonzero().squeeze(-1).split(4)
    ]
    torch.stack(losses).sum().backward()
    rewind()
    parts = lambda found, _: torch.stack([p.sum().square() for p in found[:, 1:].flatten().split(4)]).sum()  # noqa: E731
    found = differentiate(parts, ChunkedHead(head, [], hidden, *targets_of(labels), 4, rewind), each, 1.0)
    assert found.gradient is not None
    assert leaf.grad is not None
    assert relative_error(found.gradient, leaf.grad) < 1e-6


class _Largest(TorchDispatchMode):
    """Records the largest number of elements in a tensor whose last dimension is the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() > 1 and out.shape[-1] == VOCAB:
            self.rows = max(self.rows, out.numel() // VOCAB)
        return out


@pytest.mark.parametrize("loss", [DPO(), SmoothedCrossEntropy(0.1)], ids=["log-probs", "logits"])
def test_whole_logits_are_never_materialised(loss: LogProbLoss | LogitsLoss) -> None:
    each = {**pairs(8, 40, 0), REFERENCE: torch.zeros(16)}
    if isinstance(loss, LogitsLoss):
        del each[REFERENCE]
    with engine_of(tiny_model()) as engine, _Largest() as largest:
        engine.step([each], loss_fn=loss)
    assert 0 < largest.rows <= 40, "a chunk is of 7 tokens; the head's weight has 32 rows, its transpose 96"


@pytest.mark.parametrize(
    ("change", "loss", "error", "what"),
    [
        (lambda b: {k: v[:3] for k, v in b.items()}, DPO(), BatchError, "3 rows are not pairs.*chosen first"),
        (without_reference, DPO(), BatchError, f"lacks {REFERENCE}"),
        (lambda b: {**b, REFERENCE: torch.zeros(4, 5)}, DPO(), BatchError, r"\[4, 5\] for 4 rows"),
        (lambda b: {**b, "labels": b["labels"].clone().fill_(-100).index_fill(0, torch.tensor([0]), 5)},
         DPO(), BatchError, "a row has no target"),
        (without_reference, lambda found, _: found, LossError, "not a scalar"),
        (without_reference, lambda found, _: found.sum().detach(), LossError,
         "does not depend on its first argument"),
        (lambda b: {**without_reference(b), "teacher": torch.zeros(4, 3)}, Distillation(), BatchError,
         "does not match the labels"),
    ],
)  # fmt: skip
def test_loss_errors_are_reported_and_nothing_is_trained(
    change: Any, loss: Any, error: type[Exception], what: str
) -> None:
    good = {**pairs(2, 10, 0), REFERENCE: torch.zeros(4)}
    with engine_of(tiny_model()) as engine:
        before = engine.master_weights()
        with pytest.raises(error, match=what):
            engine.step([change(good)], loss_fn=loss)
        after = engine.master_weights()
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.step([good], loss_fn=DPO())


@pytest.mark.parametrize("values", [{"beta": 0.0}, {"label_smoothing": 0.5}, {"loss_type": "hinge"}])
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="DPO"):
        DPO(**values)
