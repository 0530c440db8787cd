"""`megatrain generate`: text from a model folder, or a chat with it.

The model streams through the engine with every parameter frozen, so no gradient and no optimizer state exists, and a
model that does not fit the device still speaks. What can be wrong is looked for in the order of its cost: the config,
the tokenizer, the prompt; the weights are loaded last. Left out: several prompts at once (`Engine.generate` takes
them).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.keys import LEAST, MOST
from megatrain.data import load_tokenizer
from megatrain.data.chat import ChatTemplate, choose_template
from megatrain.data.encode import chat_prompt_ids
from megatrain.data.messages import Message
from megatrain.errors import BatchError, ConfigError, DataError
from megatrain.model import Progress, TextStream, freeze_parameters, model_behind, model_named, pretrained_source
from megatrain.model.architecture import read_config
from megatrain.run.sampling import WHERE, draw_ids, prompt_ids
from megatrain.spec import Precision
from megatrain.train.engine import Engine
from megatrain.train.progress import printable

USUAL_NEW_TOKENS = 200
"""Most new tokens where the user names no number and the model has room for them."""
RESET = "/reset"
"""What a person says to begin a new chat."""


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


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    most: new tokens of a text or an answer; `None` for 200, or for what the model has room for. temperature, top_k,
    top_p: `None` as the model's own generation config has them; temperature 0 takes the likeliest token each time.
    seed: decides what is drawn.

    Raises `ConfigError` for numbers with which nothing can be drawn.
    """

    most: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature and not LEAST <= self.temperature <= MOST:  # NaN among them
            fix = f"give 0, or a number from {LEAST:g} to {MOST:g}"
            raise ConfigError(f"{self.temperature:g} is no temperature", where=WHERE, fix=fix)
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"{str(self.seed)[:40]} is no seed", where=WHERE, fix="give a number from 0 to 2**63 - 1")


class GenerationModel:
    """A model that is known but not loaded yet: its config and its tokenizer have been read.

    folder: of a model or a run. trust_remote_code: let the model bring code of its own. progress: called with (done,
    total) while it loads. notice: told, in a line each, what a person should know about the model. Raises `ModelError`
    for the model, `DataError` for the tokenizer.
    """

    def __init__(
        self,
        folder: str,
        *,
        device: str = "cpu",
        precision: Precision = "bf16",
        trust_remote_code: bool = False,
        progress: Progress | None = None,
        notice: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._folder, self._trusted = model_named(folder), trust_remote_code
        self._device, self._precision, self._progress, self.notice = device, precision, progress, notice
        base = model_behind(self._folder)
        config = read_config(base, where=f"model {base}", trust_remote_code=trust_remote_code)
        self.positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        own = (Path(self._folder) / "tokenizer_config.json").exists()
        self.tokenizer = load_tokenizer(self._folder if own else base)

    def load(self) -> Engine:
        """The engine over the weights, all of them frozen."""
        source = pretrained_source(self._folder, trains=False, trust_remote_code=self._trusted)
        freeze_parameters(source.model, ("*",))
        if left_out := source.left_out():
            self.notice(f"left out: {printable(left_out)}")
        return Engine.from_source(source, progress=self._progress, device=self._device, precision=self._precision)

    def room(self, length: int, wanted: int | None) -> int:
        """How many new tokens at most, for a prompt of `length`. Raises `BatchError` where there is too little room."""
        if self.positions is None:
            return USUAL_NEW_TOKENS if wanted is None else wanted
        room = self.positions - length
        if room < 1 or room < (wanted or 0):
            what = f"a prompt of {length:,} tokens" + (f" and {wanted:,} new ones" if wanted and room > 0 else "")
            fix = f"ask for {room:,} new ones at most" if room > 0 else "use a shorter prompt"
            raise BatchError(f"{what}, and the model has {self.positions:,} positions", where=WHERE, fix=fix)
        return min(USUAL_NEW_TOKENS, room) if wanted is None else wanted


def run_generation(
    model: GenerationModel, prompt: str, heard: Callable[[str], None], sampling: Sampling | None = None
) -> Spoken:
    """Continue `prompt`, telling `heard` new text.

    An empty prompt starts a new text. Special tokens spelled out in the prompt count as such. What `heard` gets can
    steer no terminal.

    Raises a `MegaTrainError` for whatever is wrong: `ModelError` for the weights, `DataError` and `BatchError` for a
    prompt that is no text or is too long, `ConfigError` for a setting.
    """
    sampling = sampling or Sampling()
    ids = prompt_ids(model.tokenizer, prompt)
    tokens = model.room(len(ids), sampling.most)
    with model.load() as engine:
        return _say(model, engine, ids, tokens, sampling, heard)


def run_chat(
    model: GenerationModel,
    said: Iterable[str],
    heard: Callable[[str], None],
    sampling: Sampling | None = None,
    *,
    system: str = "",
) -> int:
    """Answer what a person has `said`, one message after another, by the model's own chat template.

    said: the messages; `RESET` forgets those before. The next one is asked for when an answer has been heard, which
    ends with a new line. An answer that is interrupted (SIGINT) ends there and counts as given. Where the model has no
    room for the whole chat, its oldest messages are forgotten, never the system prompt. Returns the number of answers.

    Raises as `run_generation`, and `DataError` for a tokenizer that has no chat template or one that refuses the chat.
    """
    sampling = sampling or Sampling()
    template = _own_template(model)
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    chat_prompt_ids([*first, {"role": "user", "content": "Hello"}], template)  # refused before weights are loaded
    messages: list[Message] = []
    answers = 0
    with model.load() as engine:
        for text in said:
            if text.strip() == RESET:
                messages = []
                continue
            messages.append({"role": "user", "content": text})
            try:
                ids, forgotten = _fitted(model, template, first, messages, sampling.most)
            except BatchError as error:
                model.notice(str(error))
                messages.pop()
                continue
            if forgotten:
                model.notice(f"the chat is full: its {forgotten} oldest messages are forgotten")
            tokens = sampling.most or USUAL_NEW_TOKENS
            if model.positions is not None:
                tokens = min(tokens, model.positions - len(ids))
            with interruptions() as stopped:
                spoken = _say(model, engine, ids, tokens, sampling, heard, stopped)
            heard("\n")
            messages.append({"role": "assistant", "content": spoken.text.strip()})
            answers += 1
    return answers


def _own_template(model: GenerationModel) -> ChatTemplate:
    if not model.tokenizer.chat_template:
        where = str(model.tokenizer.name_or_path)
        raise DataError("has no chat template", where=where, fix="leave out --chat, or train it on chats first")
    return choose_template(model.tokenizer)


def _fitted(
    model: GenerationModel, template: ChatTemplate, first: list[Message], messages: list[Message], wanted: int | None
) -> tuple[list[int], int]:
    """The ids of a chat that leaves room for an answer, and how many messages were taken off the front of `messages`.

    Raises `BatchError` where the last message alone leaves no room.
    """
    forgotten = 0
    least = wanted or (USUAL_NEW_TOKENS if model.positions is None else min(USUAL_NEW_TOKENS, model.positions // 4))
    while True:
        ids = chat_prompt_ids([*first, *messages], template)
        if model.positions is None or len(ids) + least <= model.positions:
            return ids, forgotten
        if len(messages) == 1:
            model.room(len(ids), wanted)
            return ids, forgotten
        del messages[:2]  # a question and its answer
        forgotten += 2


def _say(
    model: GenerationModel,
    engine: Engine,
    ids: Sequence[int],
    tokens: int,
    sampling: Sampling,
    heard: Callable[[str], None],
    stopped: Callable[[], bool] | None = None,
) -> Spoken:
    pieces: list[str] = []

    def listen(text: str) -> None:
        pieces.append(printable(text))
        heard(pieces[-1])

    began = time.perf_counter()
    new = draw_ids(
        engine,
        model.tokenizer,
        ids,
        tokens=tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        streamer=TextStream(model.tokenizer, listen),
        stopped=stopped,
    )
    return Spoken("".join(pieces), len(new), time.perf_counter() - began)


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT has come since; meanwhile it raises nothing. Only the main thread can have it."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
