"""`megatrain generate`: text from a model folder.

The model streams through the engine with every parameter frozen, so no gradient and no optimizer state exists, and a
model that does not fit the device still speaks. What can be wrong is looked for in the order of its cost: the config,
the tokenizer, the prompt; the weights are loaded last. Left out: chat templates, and several prompts at once
(`Engine.generate` takes them).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.keys import LEAST, MOST
from megatrain.data import load_tokenizer
from megatrain.errors import BatchError, ConfigError
from megatrain.model import Progress, TextStream, freeze_parameters, model_behind, model_named, pretrained_source
from megatrain.model.architecture import read_config
from megatrain.run.sampling import WHERE, draw_ids, prompt_ids
from megatrain.spec import Precision
from megatrain.train.engine import Engine
from megatrain.train.progress import printable

USUAL_NEW_TOKENS = 200
"""Most new tokens where the user names no number and the model has room for them."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """What was said. `tokens` counts the new ones, an end of text included; `seconds` is from prompt to last token."""

    text: str
    tokens: int
    seconds: float

    def summary(self) -> str:
        """One line: how much, and how fast."""
        count = "1 token" if self.tokens == 1 else f"{self.tokens:,} tokens"
        return f"{count} in {self.seconds:.1f} s, {self.tokens / max(self.seconds, 1e-9):.2f} a second"


def run_generation(
    folder: str,
    prompt: str,
    heard: Callable[[str], None],
    *,
    device: str = "cpu",
    precision: Precision = "bf16",
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    notice: Callable[[str], object] = lambda line: None,
) -> Spoken:
    """Continue `prompt` with the model and the tokenizer in `folder`, of a model or a run, telling `heard` new text.

    An empty prompt starts a new text. Special tokens spelled out in the prompt count as such. What `heard` gets can
    steer no terminal. max_new_tokens: `None` for 200, or for what the model has room for. temperature, top_k, top_p:
    `None` as the model's own generation config has them; temperature 0 takes the likeliest token each time. seed:
    decides what is drawn. trust_remote_code: let the model bring code of its own. progress: called with (done, total)
    while weights are loaded. notice: told, in a line each, what a person should know about the model beforehand.

    Raises a `MegaTrainError` for whatever is wrong: `ModelError` for the model, `DataError` for the tokenizer,
    `BatchError` for a prompt that is too long, `ConfigError` for a setting.
    """
    _refuse_settings(temperature, seed)
    folder = model_named(folder)
    base = model_behind(folder)
    config = read_config(base, where=f"model {base}", trust_remote_code=trust_remote_code)
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    tokenizer = load_tokenizer(folder if (Path(folder) / "tokenizer_config.json").exists() else base)
    ids = prompt_ids(tokenizer, prompt)
    tokens = _new_tokens(len(ids), max_new_tokens, positions)
    pieces: list[str] = []

    def listen(text: str) -> None:
        pieces.append(printable(text))
        heard(pieces[-1])

    source = pretrained_source(folder, trains=False, trust_remote_code=trust_remote_code)
    freeze_parameters(source.model, ("*",))
    if left_out := source.left_out():
        notice(f"left out: {printable(left_out)}")
    with Engine.from_source(source, progress=progress, device=device, precision=precision) as engine:
        began = time.perf_counter()
        new = draw_ids(
            engine,
            tokenizer,
            ids,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            streamer=TextStream(tokenizer, listen),
        )
        return Spoken("".join(pieces), len(new), time.perf_counter() - began)


def _refuse_settings(temperature: float | None, seed: int) -> None:
    """Raise `ConfigError` for numbers with which nothing can be drawn."""
    if temperature and not LEAST <= temperature <= MOST:  # NaN among them
        fix = f"give 0, or a number from {LEAST:g} to {MOST:g}"
        raise ConfigError(f"{temperature:g} is no temperature", where=WHERE, fix=fix)
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"{str(seed)[:40]} is no seed", where=WHERE, fix="give a number from 0 to 2**63 - 1")


def _new_tokens(length: int, wanted: int | None, positions: int | None) -> int:
    """How many new tokens at most, for a prompt of `length`."""
    if positions is None:
        return USUAL_NEW_TOKENS if wanted is None else wanted
    room = positions - length
    if room < 1 or room < (wanted or 0):
        what = f"a prompt of {length:,} tokens" + (f" and {wanted:,} new ones" if wanted and room > 0 else "")
        fix = f"ask for {room:,} new ones at most" if room > 0 else "use a shorter prompt"
        raise BatchError(f"{what}, and the model has {positions:,} positions", where=WHERE, fix=fix)
    return min(USUAL_NEW_TOKENS, room) if wanted is None else wanted
