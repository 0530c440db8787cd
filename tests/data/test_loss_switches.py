"""Claims about the keys by which rows say what is not trained: other trainers' are honoured, unknown ones refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatrain.data.chat import choose_template, mark_chat
from megatrain.data.preferences import read_pair
from megatrain.data.read_rows import SourceRow
from megatrain.data.sample_formats import Sample, Schema, detect_schema, read_sample
from megatrain.errors import SampleError
from tests.data.chats import assistant, byte_tokenizer, user

ENDED = "<|im_end|>"


def read(fields: dict[str, Any]) -> Sample:
    row = SourceRow(fields, "rows.jsonl", "rows.jsonl:1")
    return read_sample(row, detect_schema(row, Schema()))


def refused(fields: dict[str, Any]) -> str:
    with pytest.raises(SampleError) as caught:
        read(fields)
    assert caught.value.where == "rows.jsonl:1"
    return str(caught.value)


def trained(fields: dict[str, Any], name: str = "chatml") -> list[str]:
    """The texts that are trained."""
    found = mark_chat(read(fields), choose_template(byte_tokenizer(name)), "assistant")
    return [found.text[start:stop] for start, stop in found.spans]


OFF: list[tuple[str, Any, Any]] = [
    *((key, 0, 1) for key in ("weight", "loss_weight", "loss", "loss_scale", "train", "training", "trainable")),
    *((key, 0.0, 1.0) for key in ("weight", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask")),
    *((key, False, True) for key in ("weight", "loss", "train", "training", "trainable", "loss_mask")),
    ("masked", True, False),
    ("loss", np.bool_(False), np.bool_(True)),
    ("train", "false", "true"),  # of a CSV file
]


@pytest.mark.parametrize(("key", "off", "on"), OFF)
def test_every_key_of_other_trainers_is_honoured(key: str, off: Any, on: Any) -> None:
    messages = [user("q"), assistant("BAD", **{key: off}), user("r"), assistant("GOOD", **{key: on})]
    assert trained({"messages": messages}) == [f"GOOD{ENDED}"]
    assert not any(key in message for message in read({"messages": messages}).messages)
    assert trained({"messages": [user("q"), assistant("a", **{key: None})]}) == [f"a{ENDED}"]
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "BAD", key: off}]
    assert trained({"conversations": turns}) == []
    completion = [assistant("BAD", **{key: off}), user("r"), assistant("GOOD", **{key: on})]
    assert trained({"prompt": [user("q")], "completion": completion}) == [f"GOOD{ENDED}"]


def test_parts_of_a_content_are_all_trained_or_none() -> None:
    def parts(*pairs: tuple[str, Any]) -> dict[str, Any]:
        content = [{"type": "text", "text": text, **({} if on is None else {"train": on})} for text, on in pairs]
        return {"role": "assistant", "content": content}

    assert trained({"messages": [user("q"), parts(("BAD", False), ("", True))]}) == []
    assert trained({"messages": [user("q"), parts(("a", True), ("b", None))]}) == [f"ab{ENDED}"]
    some = {"messages": [user("q"), parts(("BAD ", False), ("good", None))]}
    assert "message 2 has parts that are trained beside others that are not; train the whole" in refused(some)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (assistant("a", weight=0.5), "message 2 has a weight of 0.5; a weight is 0 or 1"),
        (assistant("a", loss="no"), "message 2 has a loss of 'no'"),
        (assistant("a", loss=2.31), "message 2 has a loss of 2.31"),
        (assistant("a", mask=1), "message 2 has 'mask': 1, which may say whether it is trained; write `train`"),
        (assistant("a", no_loss=True), "message 2 has 'no_loss': True"),
        (assistant("a", ignore_loss=True), "message 2 has 'ignore_loss': True"),
        (assistant("a", is_trained=False), "message 2 has 'is_trained': False"),
        (assistant("a", loss_weights=[0, 1]), r"message 2 has 'loss_weights': \[0, 1\]"),
        (assistant("a", skip=1), "message 2 has 'skip': 1"),
        (assistant("a", train_detail=[]), "message 2 has 'train_detail', which trains a part of it; train the whole"),
        (assistant("a", training_detail=[{"train": True}]), "message 2 has 'training_detail', which trains a part"),
        ({**user("r"), "train": True}, r"message 2 \(user\) has 'train', but only answers are trained"),
        ({**user("r"), "loss_weight": 1.0}, r"message 2 \(user\) has 'loss_weight', but only answers are trained"),
    ],
)
def test_what_cannot_be_honoured_is_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(SampleError, match=says):
        read({"messages": [user("q"), message, assistant("b")]})


def test_keys_that_say_nothing_are_read() -> None:
    more = {"name": "x", "score": 0.5, "training_source": "web", "skip": False, "not_trained": False, "id": 7}
    assert trained({"messages": [{**user("q"), "weight": 1, "step_loss_mask": 1}, assistant("a", **more)]}) == [
        f"a{ENDED}"
    ]
    row = {"weight": 1, "train": True, "loss": 2.31, "no_answer": True, "split": "train", "mask": "User", "skip": 0}
    assert trained({"messages": [user("q"), assistant("a")], **row}) == [f"a{ENDED}"]
    assert read({"text": "t", "weight": 0.3, "attention_mask": [1]}).text == "t"


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "output": "a", "skip_prompt_formatting": True},
        {"prompt": "q", "chosen": "a", "rejected": "b", "in_gsm8k_train": False},
        *(
            {"messages": [user("q"), assistant("a")], **more}
            for more in (
                *({"used_in_training": "no"}, {"loss_history": [2.3, 1.0]}, {"loss": 2.3}, {"pii_masked": True}),
                *({"ignore_case": True}, {"exclude_from_eval": True}, {"masked_ids": [1, 2]}, {"skip_reason": "x"}),
                *({"weight": float("nan")}, {"train": None}, {"train": ""}, {"weight": "1.0"}, {"only_last": ""}),
                *({"mask": "user"}, {"masked_text": "x"}, {"training_tokens": 512}, {"train_idx": [1]}, {"score": 0}),
            )
        ),
        {"messages": [user("q"), assistant("a", weight_kg=3, train_step=12, ignore_robots=True, weight=float("nan"))]},
    ],
    ids=lambda row: str(list(row.items())[-1]),
)
def test_columns_of_well_known_data_sets_are_read(row: dict[str, Any]) -> None:
    """The first two are OpenHermes-2.5's and distilabel-intel-orca-dpo-pairs'."""
    at = SourceRow(row, "r", "r:1")
    schema = detect_schema(at, Schema())
    samples = read_pair(at, schema) if schema.format == "preference" else [read_sample(at, schema)]
    said = [each.text or each.messages[-1]["content"] for each in samples]
    assert said == ["a", "b"][: len(samples)]


def test_a_call_of_sharegpt_keeps_its_keys() -> None:
    value = '{"name": "f", "arguments": {}}'
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": value, "loss": False}]
    turns += [{"from": "observation", "value": "x"}, {"from": "gpt", "value": "a"}]
    assert read({"conversations": turns}).untrained == {1}


@pytest.mark.parametrize(
    "column",
    [
        *({"weight": 0.5}, {"weight": 0}, {"sample_weight": 2.0}, {"train": False}, {"trainable": False}),
        *({"loss_mask": [0, 1]}, {"completion_mask": [0, 1]}, {"train": [1]}, {"weights": [0.0, 1.0]}),
        *({"mask": "Assistant"}, {"skip": True}, {"masked": True}, {"train": 0}, {"skip": 1}, {"loss": 0.0}),
        *({"train": "False"}, {"weight": "0.5"}, {"masked": "true"}),  # in a CSV file
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["chat", "alpaca", "completion"])
def test_columns_that_may_say_what_is_trained_are_refused(column: dict[str, Any], kind: str) -> None:
    rows = {
        "chat": {"messages": [user("q"), assistant("a")]},
        "alpaca": {"instruction": "q", "output": "a"},
        "completion": {"prompt": "q", "completion": "a"},
    }
    (name,) = column
    assert f"{name!r} is {column[name]!r}, which may" in refused({**rows[kind], **column})


def test_a_row_may_train_its_last_answer_only() -> None:
    """As in mistral-finetune."""
    messages = [user("q"), assistant("a"), user("r"), assistant("b")]
    assert trained({"messages": messages, "only_last": True}) == [f"b{ENDED}"]
    assert trained({"messages": messages, "only_last": False}) == [f"a{ENDED}", f"b{ENDED}"]
    assert "'only_last' is 'x', not true or false" in refused({"messages": messages, "only_last": "x"})


def test_training_all_text_against_the_rows_keys_is_refused() -> None:
    template = choose_template(byte_tokenizer("chatml"))
    for messages in ([user("q"), assistant("BAD", loss=False)], [{**user("q"), "weight": 0}, assistant("a")]):
        with pytest.raises(SampleError, match=r"not trained, but data\.train_on=all trains all text"):
            mark_chat(read({"messages": messages}), template, "all")
    assert mark_chat(read({"messages": [user("q"), assistant("a", loss=True)]}), template, "all").spans


def test_masks_of_token_ids_are_honoured() -> None:
    """As TRL folds them into the labels."""
    for name in ("completion_mask", "assistant_masks", "loss_mask"):
        sample = read({"input_ids": [1, 2, 3, 4], name: [0, 1, 0, 1]})
        assert sample.trained is not None
        assert sample.trained.tolist() == [False, True, False, True]
    both = read(
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "assistant_masks": [1, 1, 0], "attention_mask": [1, 1, 1]}
    )
    assert both.trained is not None
    assert both.trained.tolist() == [False, True, False]
    assert "2 loss_mask for 3 ids" in refused({"input_ids": [1, 2, 3], "loss_mask": [0, 1]})
    assert "'train_mask' is [0, 1]" in refused({"input_ids": [1, 2], "train_mask": [0, 1]})


def test_answers_of_pairs_keep_their_keys() -> None:
    turns = [{"from": "human", "value": "q"}]
    row = {
        "conversations": turns,
        "chosen": {"from": "gpt", "value": "a", "loss": False},
        "rejected": turns[0] | {"from": "gpt"},
    }
    chosen, rejected = read_pair(SourceRow(row, "r", "r:1"), Schema("preference"))
    assert (chosen.untrained, rejected.untrained) == ({0, 1}, {0})
