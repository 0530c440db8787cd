"""What callers pass to an engine: entries of micro-batches, generators, torch's own objects, mistakes."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from megatrain import AdamW, Engine, LogitsLoss, LogProbLoss, Policy
from megatrain.engine import LossFn, MicroBatch
from megatrain.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    DeviceError,
    ExportError,
    LossError,
    MegaTrainError,
    ModelError,
    PlanError,
)
from megatrain.losses import DPO
from megatrain.model import profile
from megatrain.model.forward_arguments import arguments_of
from megatrain.model.tiny import twin_of
from megatrain.spec import Placement, Work
from megatrain.spec.layer_profile import LayerProfile
from tests import measurement_cache
from tests.kinds import KINDS, stock_model, tiny_config
from tests.tiny import VOCAB, batch, equal, stock_gradients, tiny_model, unequal_batches

# Entries of a micro-batch ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_model(tiny_model(), precision="fp32", verify=False) as made:
        yield made


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"atention_mask": torch.ones(2, 8)}, "nothing reads atention_mask; did you mean 'attention_mask'"),
        ({"Position_Ids": torch.ones(2, 8)}, "nothing reads Position_Ids; did you mean 'position_ids'"),
        ({"token_type_ids": torch.zeros(2, 8)}, "nothing reads token_type_ids; leave it out"),
        ({"cache_position": torch.arange(8)}, "nothing reads cache_position"),
        ({"completion_mask": torch.ones(2, 8)}, "nothing reads completion_mask; .* `own` of a loss"),
        ({"text": ["a", "b"]}, "nothing reads text"),
        ({3: torch.ones(2)}, "nothing reads 3"),
        ({"num_items_in_batch": 14}, "num_items_in_batch is not supported; the loss is divided by"),
        ({"output_router_logits": True}, "output_router_logits is not supported; set output_router_logits in"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"inputs_embeds": torch.zeros(2, 8, 32)}, "inputs_embeds is not supported"),
        ({"use_cache": True}, "use_cache is not supported"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 16])}, "nothing reads cu_seq_lens_q; .* by position_ids"),
        ({"seq_idx": torch.zeros(1, 16)}, "nothing reads seq_idx; .* by position_ids"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_unused_batch_entries_are_refused_by_name(engine: Engine, entry: dict[Any, Any], says: str) -> None:
    good = batch(2, 8, 0)
    for call in (engine.step, engine.gradients, engine.evaluate, engine.log_probs, lambda each: engine.logits(each[1])):
        with pytest.raises(BatchError, match=says) as caught:
            call([good, {**good, **entry}])
        assert "\n" not in str(caught.value)
    assert engine.evaluate([good]) == engine.evaluate([{**good, **dict.fromkeys(entry)}])  # None counts as absent


def test_redundant_batch_entries_are_accepted(engine: Engine) -> None:
    good = batch(2, 8, 0)
    usual = {"use_cache": False, "return_dict": True, "output_attentions": False, "output_router_logits": False}
    assert engine.evaluate([{**good, **usual, "logits_to_keep": 0}]) == engine.evaluate([good])


def packed(lengths: tuple[int, ...]) -> dict[str, Any]:
    """One row of several samples as collators of TRL and transformers give it, with the boundaries in three forms."""
    each = batch(1, sum(lengths), 5)
    begins = torch.tensor([0, *lengths]).cumsum(0)
    each["position_ids"] = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    return {
        **each,
        "cu_seq_lens_q": begins.to(torch.int32),
        "cu_seq_lens_k": begins.to(torch.int32),
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0),
    }


@pytest.mark.parametrize("shape", [(1, -1), (-1,)])
def test_packing_entries_that_match_positions_are_accepted(engine: Engine, shape: tuple[int, ...]) -> None:
    given = packed((4, 1, 7))
    given["seq_idx"] = given["seq_idx"].view(shape)
    alone = {key: given[key] for key in ("input_ids", "labels", "position_ids")}
    assert engine.evaluate([given]) == engine.evaluate([alone])
    assert engine.evaluate([alone]) != engine.evaluate([{key: alone[key] for key in ("input_ids", "labels")}])
    for key in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
        other = packed((5, 1, 6))[key] if key != "max_length_q" and key != "max_length_k" else 5
        with pytest.raises(BatchError, match=f"nothing reads {key}"):
            engine.evaluate([{**given, key: other}])


def test_entries_read_inside_the_model_are_accepted() -> None:
    """GPT-2 has token types and an attention mask as parameters; only the kernel reads a kernel's options."""
    model = tiny_model("gpt2")
    typed = [{**batch(2, 8, 0), "token_type_ids": torch.randint(0, VOCAB, (2, 8))}]
    loss, expected = stock_gradients(model, typed)
    assert loss != pytest.approx(stock_gradients(model, [batch(2, 8, 0)])[0], rel=1e-5)
    with Engine.from_model(model, precision="fp32", verify=False) as engine:
        assert engine.evaluate(typed) == pytest.approx(loss, rel=1e-6)
        found = engine.gradients(typed)
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-6


def test_attention_kernel_flags_are_passed_on() -> None:
    """The sdpa kernel has a parameter `is_causal`, behind two functions with `**kwargs`."""
    model = tiny_model()
    both_ways = {**batch(2, 8, 0), "is_causal": False, "attention_mask": None}
    with Engine.from_model(model, precision="fp32", verify=False) as engine, torch.no_grad():
        expected = model(input_ids=both_ways["input_ids"], is_causal=False).logits
        found = engine.logits({key: value for key, value in both_ways.items() if key != "labels"})
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_unused_masks_are_accepted_if_they_hide_only_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An xLSTM reads no mask, and later tokens do not influence a token."""
    measurement_cache.remember(profile, False)
    monkeypatch.setattr(profile, "profile_layer", lambda *_: LayerProfile())  # half a minute, and not asked about here
    with Engine.from_model(twin_of(AutoConfig.for_model("xlstm"), 0), precision="fp32", verify=False) as engine:
        ids = torch.randint(3, 60, (2, 8))
        mask = torch.ones(2, 8, dtype=torch.int64)
        mask[0, 5:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        ended = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        assert engine.evaluate([ended]) == engine.evaluate([{"input_ids": ids, "labels": labels}])
        for wrong in ({"attention_mask": mask.flip(1)}, {"labels": ids}):
            with pytest.raises(BatchError, match="nothing reads attention_mask"):
                engine.evaluate([{**ended, **wrong}])


@pytest.mark.parametrize("kind", KINDS)
def test_misspelt_masks_are_refused(kind: str) -> None:
    found = arguments_of(stock_model(tiny_config(kind), 0), ())
    assert {"input_ids", "attention_mask"} <= found.own
    for name in ("atention_mask", "num_items_in_batch", "mm_token_type_ids", "completion_mask", "value", "x", "kwargs"):
        assert name not in found


def test_wrapped_forwards_accept_the_same_arguments() -> None:
    model = tiny_model("gpt2")
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    found = arguments_of(model, ())
    for name in ("attention_mask", "token_type_ids", "position_ids"):
        assert name in found
    assert "atention_mask" not in found


def test_only_flash_attention_reads_sequence_boundaries() -> None:
    model = tiny_model()
    assert "cu_seq_lens_q" not in arguments_of(model, ())
    model.config._attn_implementation = "flash_attention_2"
    assert {"cu_seq_lens_q", "max_length_k"} <= arguments_of(model, ()).read


class Advantage(LogProbLoss):
    """A policy loss with its own entry."""

    own = ("advantages",)

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> Tensor:
        return -(batch["advantages"] * log_probs).sum()


def test_only_the_chosen_losses_entries_are_accepted(engine: Engine) -> None:
    given = [{**batch(2, 8, 0), "advantages": torch.ones(2, 8)}]
    assert engine.measure(given, Advantage()).loss == pytest.approx(engine.evaluate([batch(2, 8, 0)]), rel=1e-6)
    losses: tuple[LossFn | None, ...] = (None, lambda log_probs, _: -log_probs.sum())
    for loss in losses:
        with pytest.raises(BatchError, match=r"nothing reads advantages; .* name it in `own` of a loss that reads it"):
            engine.measure(given, loss)
    with pytest.raises(BatchError, match="nothing reads advantage; did you mean 'advantages'"):
        engine.measure([{**given[0], "advantage": torch.ones(2, 8)}], Advantage())


# What micro-batches come in -------------------------------------------------------------------------------------------


def test_a_step_takes_any_iterable_of_mappings(engine: Engine) -> None:
    expected = engine.evaluate(unequal_batches())
    others: list[Any] = [
        (each for each in unequal_batches()),
        tuple(unequal_batches()),
        map(UserDict, unequal_batches()),
        dict(enumerate(unequal_batches())).values(),
    ]
    for given in others:
        assert engine.evaluate(given) == expected
    gradients = engine.gradients(unequal_batches())
    assert equal(engine.gradients(each for each in unequal_batches()), gradients)
    assert len(engine.log_probs(each for each in unequal_batches())) == len(unequal_batches())
    assert engine.step(each for each in unequal_batches()).tokens > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "step: expected a list of micro-batches, not None"),
        (5, "step: expected a list of micro-batches, not an int"),
        ("batches", "step: expected a list of micro-batches, not a str"),
        (torch.ones(2, 8, dtype=torch.long), "step: expected a list of micro-batches, not a Tensor"),
        (batch(1, 5, 0), "step: expected a list of micro-batches, not one; put it into a list"),
        *(
            ([{key: value.to(dtype) for key, value in batch(1, 5, 0).items()}], "int64 or int32")
            for dtype in (torch.uint8, torch.int16, torch.bool)
        ),
        ([None], "micro-batch 0: is None, not a mapping of names to tensors; give a dict with input_ids"),
        ([batch(1, 4, 0), [batch(1, 4, 0)]], "micro-batch 1: is a list, not a mapping"),
        ([torch.ones(2, 8, dtype=torch.long)], "micro-batch 0: is a Tensor, not a mapping"),
        ((each for each in ()), "step: a step needs at least one micro-batch"),
        ([{}], "has no input_ids"),
        ([{"input_ids": torch.ones(1, 4, dtype=torch.long), "label": None, "lables": 1}], "did you mean 'lables'"),
        ([{"input_ids": [[3, 4]], "labels": [[3, 4]]}], "input_ids must be .* not list"),
        ([{"input_ids": np.ones((1, 4), np.int64), "labels": np.ones((1, 4))}], "input_ids must be .* not ndarray"),
        ([{key: value.to("meta") for key, value in batch(1, 4, 0).items()}], "input_ids has no values .meta device."),
        ([{**batch(1, 4, 0), "labels": torch.ones(1, 4, dtype=torch.long, device="meta")}], "labels has no values"),
        ([{**batch(1, 4, 0), "attention_mask": torch.ones(1, 4, device="meta")}], "attention_mask has no values"),
        ([{**batch(1, 4, 0), "attention_mask": "x"}], "micro-batch 0: attention_mask is a str, and input_ids"),
        ([{**batch(2, 4, 0), "attention_mask": torch.ones(4)}], r"attention_mask is torch.float32\[4\]"),
        ([{**batch(2, 4, 0), "attention_mask": torch.ones(3, 4)}], r"attention_mask is torch.float32\[3, 4\]"),
        ([{**batch(2, 4, 0), "attention_mask": np.ones((2, 4))}], "attention_mask is a ndarray"),
        ([{**batch(2, 4, 0), "position_ids": [0, 1, 2, 3]}], "position_ids is a list"),
        ([{**batch(2, 4, 0), "position_ids": torch.arange(4)}], r"position_ids is torch.int64\[4\]"),
        ([{**batch(2, 4, 0), "position_ids": torch.arange(3)[None]}], r"position_ids is torch.int64\[1, 3\]"),
        (
            [{**batch(1, 4, 0), "position_ids": torch.arange(4)[None] + 1000}],
            "position_ids go up to 1,003, but the model",
        ),
        ([{**batch(1, 4, 0), "attention_mask": torch.tensor([[1, 1, 2, 2]])}], "contains 2; .* position_ids"),
        ([{**batch(1, 4, 0), "attention_mask": torch.tensor([[-1e9, 0, 0, 0]])}], "attention_mask contains -1e.09"),
        ([{**batch(1, 4, 0), "attention_mask": torch.ones(1, 1, 4, 4).long()}], r"torch.int64\[1, 1, 4"),
        ([{**batch(2, 4, 0), "attention_mask": torch.ones(2, 1, 3, 4) > 0}], r"torch.bool\[2, 1, 3, 4"),
        ([{**batch(2, 4, 0), "attention_mask": torch.ones(3, 1, 4, 4) > 0}], r"torch.bool\[3, 1, 4, 4"),
        ([{**batch(1, 4, 0), "position_ids": torch.ones(1, 4) > 0}], r"position_ids is torch.bool\[1, 4\]"),
        ([{**batch(1, 4, 0), "position_ids": torch.arange(4.0)[None]}], r"position_ids is torch.float32\[1, 4\]"),
        ([{**batch(1, 4, 0), "position_ids": torch.arange(4)[None] - 1}], "position_ids contains -1; give"),
        ([{"input_ids": torch.ones(1, 4, dtype=torch.long)}], "has no labels; .* labels=input_ids"),
        (
            [{**batch(1, 4, 0), "input_ids": torch.ones(1, 4, dtype=torch.long).to_sparse()}],
            "input_ids is torch.sparse",
        ),
    ],
)
def test_invalid_micro_batches_are_refused(engine: Engine, given: Any, says: str) -> None:
    with pytest.raises(BatchError, match=says) as caught:
        engine.step(given)
    assert "\n" not in str(caught.value)


class _Halves(LogitsLoss):
    def __call__(self, logits: Tensor, labels: Tensor, **own: Tensor) -> Tensor:
        return logits.sum() * (1 // 0)


@pytest.mark.parametrize(
    ("loss", "says"), [(DPO, r"DPO is not a loss .* create an instance: DPO\(\)"), ("nll", "a str is not a loss")]
)
def test_invalid_losses_are_refused(engine: Engine, loss: Any, says: str) -> None:
    for call in (engine.step, engine.gradients, engine.measure):
        with pytest.raises(LossError, match=says):
            call(unequal_batches(), loss_fn=loss)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (torch.nn.functional.cross_entropy, "cross_entropy: TypeError: .* not dict; it is called with"),
        (lambda log_probs, batch: batch["weight"] * log_probs, "<lambda>: KeyError: 'weight'; it is called with"),
        (lambda log_probs, batch: -log_probs.mul_(2).sum(), "<lambda>: RuntimeError: .* in-place"),
        (_Halves(), "_Halves: ZeroDivisionError: .*; it is called with the logits and labels of some"),
    ],
)
def test_a_loss_that_raises_is_named_with_what_it_is_called_with(engine: Engine, loss: Any, says: str) -> None:
    before = engine.master_weights()
    with pytest.raises(LossError, match=says) as caught:
        engine.step(unequal_batches(), loss_fn=loss)
    assert caught.value.__cause__ is not None
    assert equal(engine.master_weights(), before)


# Arguments of an engine -----------------------------------------------------------------------------------------------


def test_a_torch_device_names_a_device() -> None:
    for device in (torch.device("cpu"), torch.device("cpu", 0), "cpu:0"):
        with Engine.from_model(tiny_model(), device, verify=False) as engine:
            assert engine.step(unequal_batches()).tokens > 0
            assert "on cpu" in repr(engine)
    for other in (torch.device("meta"), "cpu:1", "cuda:²", 0, None, np.int64(0), ["cpu"]):
        with pytest.raises(DeviceError, match="is not a device; use cpu, cuda:0 or sim:SEED"):
            Engine.from_model(tiny_model(), other, verify=False)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="finds no CUDA device"):
        Engine.from_model(tiny_model(), torch.device("cuda"), verify=False)


def calls_of(engine: Engine, folder: Path) -> Iterator[tuple[str, Any]]:
    """Every kind of call, with what it returns in a form that can be compared."""
    batches, begun = unequal_batches(), unequal_batches()[0]["input_ids"][:, :3]
    yield "step", lambda: engine.step(batches).loss
    yield "gradients", lambda: {name: value.tolist() for name, value in engine.gradients(batches).items()}
    yield "evaluate", lambda: engine.evaluate(batches)
    yield "log_probs", lambda: [each.tolist() for each in engine.log_probs(batches)]
    yield "logits", lambda: engine.logits({"input_ids": begun}).tolist()
    yield "generate", lambda: engine.generate(begun, max_new_tokens=2, do_sample=True).tolist()
    yield "master", lambda: engine.weights["lm_head.weight"].tolist()
    yield "set_weights", lambda: engine.weights.update({"model.norm.weight": torch.ones(32, device="cpu")})
    yield "adopt", lambda: engine.adopt(replace(engine.policy, shard_nbytes=2048))
    yield "prepare", lambda: len(engine.parts.prepare(Work((8,))).ops)
    yield "flops", lambda: engine.diagnostics.step_flops(batches)
    yield "save", lambda: engine.save(folder).wait().name
    yield "restore", lambda: engine.restore(str(next(folder.iterdir())))
    yield "step after", lambda: engine.step(batches).loss
    yield "save_pretrained", lambda: engine.save_pretrained(folder / "out").name
    yield "master_weights", lambda: {name: value.tolist() for name, value in engine.master_weights().items()}


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "sim:3"])
def test_the_callers_default_device_does_not_matter(device: str, tmp_path: Path) -> None:
    model, given = tiny_model(), {"device": device, "precision": "fp32", "verify": False}
    with torch.device("meta"):
        other = Engine.from_model(model, **given)  # type: ignore[arg-type]
    with Engine.from_model(model, **given) as plain, other:  # type: ignore[arg-type]
        both = zip(calls_of(plain, tmp_path / "plain"), calls_of(other, tmp_path / "other"), strict=True)
        for (name, call), (_, there) in both:
            expected = call()
            with torch.device("meta"):
                found = there()
            assert found == expected, name
    with torch.device("meta"):
        made = Engine.from_checkpoint(next((tmp_path / "plain").glob("step-*")), **given)  # type: ignore[arg-type]
    with made:
        assert made.steps == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
            "a torch.optim.adamw.AdamW cannot .*, nor can its .*; give megatrain.AdamW, .* and the rate of each step",
        ),
        (lambda model: [torch.optim.SGD(model.parameters())], r"\[SGD .* is not an optimizer of megatrain; give"),
        (lambda model: AdamW, "AdamW is a class; make one"),
        (lambda model: torch.optim.AdamW, "AdamW is a class; make one"),
        (lambda model: "adamw", "'adamw' is not an optimizer of megatrain; give megatrain.AdamW"),
    ],
)
def test_other_optimizers_are_refused(make: Callable[[torch.nn.Module], Any], says: str) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=rf"^optimizer: .*{says}"):
        Engine.from_model(model, optimizer=make(model))


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"seed": "0"}, ConfigError, "seed: '0' is not valid; use a whole number"),
        ({"seed": 1 << 70}, ConfigError, "seed: .* is not valid"),
        ({"verify": "no"}, ConfigError, "verify: 'no' is not valid; use true or false"),
        ({"max_grad_norm": "1"}, ConfigError, "max_grad_norm: '1' is not a norm"),
        ({"max_grad_norm": True}, ConfigError, "max_grad_norm: True is not a norm"),
        ({"max_grad_norm": float("nan")}, ConfigError, "max_grad_norm: nan is not a norm"),
        ({"policy": None}, PlanError, "policy: None is not a policy"),
        ({"policy": {"weight_slots": 1}}, PlanError, "policy: {'weight_slots': 1} is not a policy"),
        ({"policy": "fast"}, PlanError, "policy: 'fast' is not a policy; give a megatrain.Policy, or 'auto'"),
        ({"precision": ["bf16"]}, PlanError, "precision: must be bf16 or fp32"),
        ({"world": 2}, ConfigError, "world: 2 is not valid; use a World"),
        ({"disk": 5}, ConfigError, "disk: 5 is not valid"),
        ({"disk": [None]}, ConfigError, r"disk\[0\]: None is not valid"),
        (
            {"policy": Policy(placements=(Placement(),) * 9)},
            PlanError,
            "places the state of 9 units, but the model has 5",
        ),
    ],
    ids=str,
)
def test_arguments_of_wrong_types_are_refused_by_name(wrong: dict[str, Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        Engine.from_model(tiny_model(), **{"verify": False, **wrong})


def test_an_engine_is_neither_copied_nor_pickled(engine: Engine, tmp_path: Path) -> None:
    for call in (copy.copy, copy.deepcopy, pickle.dumps, lambda each: torch.save(each, tmp_path / "engine.pt")):
        with pytest.raises(DeviceError, match=r"engine: cannot be copied or pickled; .* save_pretrained"):
            call(engine)
    assert engine.evaluate(unequal_batches()) > 0


def test_hyperparameters_are_not_set_by_assignment(engine: Engine) -> None:
    """It would have no effect, or half of one."""
    for name, value in (("optimizer", AdamW(lr=1.0)), ("max_grad_norm", 3.0)):
        with pytest.raises(AttributeError, match="has no setter"):
            setattr(engine, name, value)
    with pytest.raises(ConfigError, match=r"optimizer: a torch\.optim\.adamw\.AdamW cannot update"):
        engine.set_optimizer(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optimizer: None is not an optimizer"):
        engine.set_optimizer(None)  # type: ignore[arg-type]


def test_what_is_no_model_is_refused_with_what_to_pass() -> None:
    model, makes = tiny_model(), Engine.from_model
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own modules
        compiled = torch.compile(model)
    cases: list[tuple[Callable[[Any], object], Any, str]] = [
        (makes, compiled, "model OptimizedModule: wraps a transformers model; pass the model in it"),
        (makes, torch.nn.DataParallel(model), "model DataParallel: wraps a transformers model; pass the model in it"),
        (makes, BertModel(BertConfig(**small)), "no language-model head"),
        (makes, T5ForConditionalGeneration(T5Config(**small, d_model=16)), "encoder-decoder"),
        (makes, "gpt2", "model str: not a transformers model; pass an AutoModelForCausalLM"),
        (Engine.from_pretrained, model, "is a LlamaForCausalLM, not a path; .* Engine.from_model"),
        (Engine.from_pretrained, None, "is a NoneType, not a path; name a file or a folder"),
        (lambda given: Engine.from_config(model.config, freeze=given), "*embed*", "freeze: .*embed.* is not valid"),
    ]
    for call, given, says in cases:
        with pytest.raises(MegaTrainError, match=says):
            call(given)


def test_a_single_folder_is_a_folder_for_the_disk(tmp_path: Path) -> None:
    for folder in (tmp_path, str(tmp_path)):
        placements = (Placement(moments="disk"),) * 5
        policy = Policy(placements=placements, shares_memory=True)
        with Engine.from_model(tiny_model(), policy=policy, disk=folder, verify=False) as engine:
            assert engine.step(unequal_batches()).tokens > 0
            assert engine.parts.disk is not None
            assert engine.parts.disk.nbytes() > 0


def test_engine_query_arguments_are_checked(engine: Engine, tmp_path: Path) -> None:
    ids = batch(1, 4, 0)["input_ids"]
    ours: Any = engine  # whose types are not kept to here
    cases: list[tuple[Callable[[], object], type[MegaTrainError], str]] = [
        (lambda: ours.weights["lm_head"], ModelError, "no parameter is called 'lm_head'; did you mean 'lm_head.weight"),
        (lambda: ours.weights[3], ModelError, "no parameter is called 3"),
        (lambda: ours.adopt("auto"), PlanError, "policy: 'auto' is not valid; use a Policy"),
        (lambda: ours.parts.prepare(64), PlanError, "work: 64 is not valid; use a Work"),
        (lambda: ours.restore(None), CheckpointError, "restore: None is not valid; use a Checkpoint, a text or a P"),
        (lambda: ours.restore(tmp_path), DamagedCheckpoint, str(tmp_path)),
        (lambda: ours.diagnostics.trace(tmp_path / "x", steps=0), ConfigError, r"trace\.steps: 0 is not valid"),
        (lambda: ours.generate(ids, seed="0"), ConfigError, "seed: '0' is not valid"),
        (lambda: ours.generate([[3, 4]]), BatchError, "generate: input_ids must be"),
        (lambda: ours.generate(ids, [[1] * 4]), BatchError, "generate: attention_mask is no"),
        (lambda: ours.step(unequal_batches(), lr="1e-3"), ConfigError, "lr: '1e-3' is not valid"),
        (lambda: ours.logits([ids]), BatchError, "logits: is a list, not a mapping"),
        (lambda: ours.weights.view("lm_head"), ModelError, "weights.view: no parameter is called 'lm_head'"),
        (lambda: ours.generate(ids, torch.tensor([[1, 1, 1, 0]])), BatchError, "hides the end of row 0; pad on the"),
        (lambda: ours.save(tmp_path, step=-1), CheckpointError, "step: -1 is not valid; use a whole number"),
        (lambda: ours.save(tmp_path, step="last"), CheckpointError, "step: 'last' is not valid"),
        (lambda: ours.save(tmp_path, score="0.5"), CheckpointError, "score: '0.5' is not valid"),
        (lambda: ours.save_pretrained(None), ExportError, "is a NoneType, not a path"),
        (lambda: ours.save_pretrained(tmp_path / "x", precision="fp16"), ExportError, "precision: 'fp16' is not valid"),
        (lambda: ours.weights.update(None), ModelError, "weights.update: None is not valid; use a Mapping"),
        (lambda: ours.weights.update(tiny_model()), ModelError, "weights.update: .* is not valid; use a Mapping"),
        (
            lambda: ours.weights.update({"lm_head.weight": np.zeros((96, 32))}),
            ModelError,
            "is a ndarray; give a tensor",
        ),
        (
            lambda: ours.weights.update({"lm_head.weight": torch.zeros(96, 32, device="meta")}),
            ModelError,
            "has no values",
        ),
        (
            lambda: ours.weights.update({"lm_head.weight": torch.zeros(9)}),
            ModelError,
            r"shape \[9\]; it has \[96, 32\]",
        ),
        (
            lambda: ours.weights.update({"lm_head": torch.zeros(9)}),
            ModelError,
            "has no parameter lm_head .*lm_head.weight",
        ),
    ]
    before = engine.master_weights()
    for call, error, says in cases:
        with pytest.raises(error, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert equal(engine.master_weights(), before)
    assert not any(tmp_path.iterdir())


def test_an_export_in_place_of_a_checkpoint_is_named(engine: Engine, tmp_path: Path) -> None:
    engine.save_pretrained(tmp_path / "model")
    for call in (engine.restore, Engine.from_checkpoint):
        with pytest.raises(DamagedCheckpoint, match=r"is a model without a state of training; .*from_pretrained"):
            call(tmp_path / "model")


def test_an_engine_has_a_useful_repr() -> None:
    model = tiny_model()
    with Engine.from_model(model, precision="fp32", verify=False) as engine:
        engine.step(unequal_batches())
        said = repr(engine)
        assert said.startswith("<Engine of LlamaForCausalLM: ")
        assert f"{model.num_parameters():,} parameters, fp32 on cpu, 1 steps, " in said
        assert "kB on the host>" in said
    assert repr(engine).endswith("fp32 on cpu, closed>")
    model.lm_head.weight.requires_grad_(False)
    with Engine.from_model(model, "sim:1", verify=False) as engine:
        assert f"{engine.structure.trained_numel:,} trained, bf16 on sim:1, 0 steps" in repr(engine)
