"""Generate text with an engine, for a run's samples and for `megatrain generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatrain.config import Config, TrainSection
from megatrain.config.field_types import LEAST, MOST
from megatrain.data.tokenizer import Tokenizer, encode_text, end_of_text_id, leading_ids, vocabulary_size
from megatrain.errors import ConfigError, DataError
from megatrain.model import TextStream
from megatrain.run.data import Corpus
from megatrain.train.engine import Engine
from megatrain.train.events import Sampled
from megatrain.train.progress import printable

WHERE = "generate"
USUAL_NEW_TOKENS = 200
"""Default number of new tokens, if the model has enough positions."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a text.

    most: maximum number of new tokens; `None`: 200, or fewer if the model has no room for them. temperature, top_k,
    top_p: `None`: as in the model's generation config; temperature 0 always takes the most likely token.

    Raises `ConfigError` for a temperature or seed out of range.
    """

    most: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature and not LEAST <= self.temperature <= MOST:  # NaN among them
            fix = f"give 0, or a number from {LEAST:g} to {MOST:g}"
            raise ConfigError(f"temperature {self.temperature:g} is out of range", where=WHERE, fix=fix)
        if not 0 <= self.seed < 1 << 63:
            what = f"seed {str(self.seed)[:40]} is out of range"
            raise ConfigError(what, where=WHERE, fix="give a number from 0 to 2**63 - 1")


def stop_at_ends(config: Config, engine: Engine, corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Let generation, by the saved model too, end at `corpus.ends` if the configuration says so, and return the corpus
    with a fact about it."""
    stops = corpus.begun.get("stops", engine.generation_config.eos_token_id)  # a checkpoint's has `corpus.ends`, too
    new = [end for end in corpus.ends if end not in _as_list(stops)] if config.output.stop_at_turn_end else []
    engine.generation_config.eos_token_id = [*new, *_as_list(stops)] if new else stops
    corpus = replace(corpus, begun={**corpus.begun, "stops": stops})
    if not new:
        return corpus
    marks = " and ".join(printable(str(tokenizer.decode([end]))) for end in new)
    told = f"{marks} ends what is trained, so generation stops there too (output.stop_at_turn_end)"
    return replace(corpus, facts=[*corpus.facts, ("end", told)])


def _as_list(ids: int | Sequence[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of the prompt, which begins like a trained text: with what the tokenizer puts before one (bos), unless
    it says so itself, and without what it puts behind one. At least one."""
    try:
        ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    except (TypeError, UnicodeEncodeError) as error:  # raised for a lone surrogate
        raise DataError("the prompt is not Unicode text", where=WHERE, fix="remove the lone surrogate") from error
    leading = leading_ids(tokenizer)
    if ids := ids if ids[: len(leading)] == leading else leading + ids:
        return ids
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        raise DataError("the prompt is empty, and the tokenizer has no start token", where=WHERE)
    return [start]


def draw_ids(
    engine: Engine,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    sampling: Sampling,
    *,
    ends: Sequence[int] = (),
    streamer: TextStream | None = None,
) -> list[int]:
    """Generate ids after `ids`; the last may be one that ends generation.

    Ids unknown to the tokenizer are never drawn, as a model may have more logits than its tokenizer has tokens.
    ends: ids that end generation, besides those of the generation config and the tokenizer's end-of-text token.
    """
    stops = {*_as_list(engine.generation_config.eos_token_id), tokenizer.eos_token_id, *ends} - {None}
    options: dict[str, Any] = {"eos_token_id": sorted(stops) or None, "streamer": streamer}
    options["pad_token_id"] = min(stops, default=0)  # never used: one row has no padding
    if unknown := range(vocabulary_size(tokenizer), engine.structure.vocab_size):
        options["suppress_tokens"] = list(unknown)
    given = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    if sampling.temperature == 0:
        options["do_sample"] = False
    elif chosen := {name: value for name, value in given.items() if value is not None}:
        options |= {"do_sample": True, **chosen}
    options["max_new_tokens"] = sampling.most or USUAL_NEW_TOKENS
    text = engine.generate(torch.tensor([ids]), seed=sampling.seed, **options)
    new: list[int] = text[0, len(ids) :].tolist()
    return new


def sample_of(
    train: TrainSection, engine: Engine, corpus: Corpus, tokenizer: Tokenizer, prompt: str, step: int
) -> Sampled:
    """The model's continuation of `prompt`, or its answer if chats are trained.

    Without a prompt it begins a document, or answers the first sample (held out, if any are): what is trained on
    answers alone has learnt to begin nothing. When the sequence length is reached, generation continues from the second
    half of the text.
    """
    end, window = end_of_text_id(tokenizer), corpus.window
    if not prompt and (first := corpus.first_prompt()):
        ids, prompt = first, str(tokenizer.decode(first))
    elif corpus.chats is not None and prompt:
        ids = corpus.chats.prompt_ids(prompt)
    else:
        ids = [*(corpus.leading or [end]), *encode_text(tokenizer, prompt).tolist()]
    drawn: list[int] = []
    ends = {end, *corpus.ends}
    while len(drawn) < train.sample_tokens and not ends & {*drawn[-1:]}:
        seen = [*ids, *drawn]
        seen = seen if len(seen) < window else seen[-max(1, window // 2) :]
        most = max(1, min(train.sample_tokens - len(drawn), window - len(seen)))
        sampling = Sampling(most, train.sample_temperature, train.sample_top_k, 1.0, train.seed + len(drawn))
        drawn += draw_ids(engine, tokenizer, seen, sampling, ends=corpus.ends)
    said = drawn[:-1] if ends & {*drawn[-1:]} else drawn
    return Sampled(step, prompt, str(tokenizer.decode(said)))
