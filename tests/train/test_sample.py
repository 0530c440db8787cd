"""Drawing text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.train.sample import draw_id, draw_ids, printable

VOCABULARY = 12


def successor(ids: Tensor) -> Tensor:
    """A model that is sure that the next id is one more than the last."""
    logits = torch.full((VOCABULARY,), -100.0)
    logits[(int(ids[0, -1]) + 1) % VOCABULARY] = 100.0
    return logits


def uniform(ids: Tensor) -> Tensor:
    return torch.zeros(VOCABULARY)


def draw(next_logits: Any, prompt: list[int], **changed: Any) -> list[int]:
    arguments: dict[str, Any] = {"tokens": 5, "allowed": VOCABULARY, "stop_id": None, **changed}
    return draw_ids(next_logits, prompt, **arguments)


def test_what_is_drawn_follows_the_prompt_and_is_seen_by_the_next_draw() -> None:
    assert draw(successor, [3]) == [4, 5, 6, 7, 8]


def test_the_stop_id_ends_the_text_and_is_not_in_it() -> None:
    assert draw(successor, [3], stop_id=6) == [4, 5]


def test_the_model_sees_no_more_than_its_context() -> None:
    lengths: list[int] = []

    def spy(ids: Tensor) -> Tensor:
        assert ids.dtype == torch.int64
        lengths.append(ids.shape[1])
        return successor(ids)

    draw(spy, [0, 1], context=4)
    assert lengths == [2, 3, 4, 4, 4]


def test_logits_beyond_the_tokenizer_are_never_drawn() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[8:] = 50.0
    assert max(draw(lambda ids: logits, [0], allowed=8, tokens=50)) < 8


def test_a_seed_fixes_the_text_whatever_else_draws() -> None:
    first = draw(uniform, [0], tokens=20, seed=7)
    torch.rand(3)
    assert draw(uniform, [0], tokens=20, seed=7) == first
    assert draw(uniform, [0], tokens=20, seed=8) != first


def test_drawing_leaves_the_random_state_of_training_alone() -> None:
    before = torch.get_rng_state()
    draw(uniform, [0], tokens=20)
    assert torch.equal(torch.get_rng_state(), before)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([1.0, 3.0, 2.999])
    assert {draw_id(logits, temperature=0, top_k=0, generator=torch.Generator()) for _ in range(20)} == {1}


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_top_k_draws_all_of_the_likeliest_and_nothing_else(top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3])
    drawn = {draw_id(logits, temperature=1.0, top_k=top_k, generator=generator) for _ in range(200)}
    assert drawn == set(logits.topk(top_k).indices.tolist())


def test_draws_follow_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.9, 0.1]).log()
    ones = sum(draw_id(logits, temperature=1.0, top_k=0, generator=generator) for _ in range(2000))
    assert 140 < ones < 260  # 200 expected, 13 is one standard deviation


def test_printable_text_steers_no_terminal() -> None:
    assert printable("a\tb\n\x1b[2J\x07é\u200e") == "a\tb\n\ufffd[2J\ufffdé\ufffd"
