"""`megatrain generate`: generate text from a model folder, or answer questions with it.

All parameters are frozen, so there are no gradients and no optimizer state, and the model streams through the engine,
so it need not fit on the device. Cheap checks come first (config, tokenizer, prompt); the weights are loaded last. For
several prompts at once see `Engine.generate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.checkpoint.folder import refuse_damaged_weights
from megatrain.data.chat import ChatTemplate, chat_prompt_ids, choose_template
from megatrain.data.encode import turn_ends
from megatrain.data.messages import Message
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import BatchError, DataError
from megatrain.model import Progress, TextStream, freeze_parameters, model_behind, model_named, pretrained_source
from megatrain.model.architecture import position_limit, read_config
from megatrain.run.sampling import USUAL_NEW_TOKENS, WHERE, Sampling, draw_ids, prompt_ids
from megatrain.spec import Precision
from megatrain.train.engine import Engine
from megatrain.train.progress import printable


@dataclass(frozen=True, slots=True)
class Spoken:
    """Generated text. `tokens` counts new tokens including an end of text; `seconds` is from prompt to last token."""

    text: str
    tokens: int
    seconds: float

    def summary(self) -> str:
        count = "1 token" if self.tokens == 1 else f"{self.tokens:,} tokens"
        return f"{count} in {self.seconds:.1f} s, {self.tokens / max(self.seconds, 1e-9):.2f} per second"


class GenerationModel:
    """A model to generate from: reads config and tokenizer at once, and the weights in `load`.

    folder: model folder, run folder or hub name. base: of an adapter, in place of the one that it names.
    trust_remote_code: run code that comes with the model. progress: called with (done, total) while loading. notice:
    called with lines for the user about the model. Raises `ModelError` for a bad model, `DataError` for a bad
    tokenizer.
    """

    def __init__(
        self,
        folder: str,
        *,
        device: str = "cpu",
        precision: Precision = "bf16",
        base: str | None = None,
        trust_remote_code: bool = False,
        progress: Progress | None = None,
        notice: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._folder, self._trusted = model_named(folder), trust_remote_code
        self._device, self._precision, self._progress, self.notice = device, precision, progress, notice
        self._base, behind = base, model_behind(self._folder, base)
        config = read_config(behind, where=f"model {behind}", trust_remote_code=trust_remote_code)
        self.positions = position_limit(config)
        has_tokenizer = (Path(self._folder) / "tokenizer_config.json").exists()
        self.tokenizer = load_tokenizer(self._folder if has_tokenizer else behind)
        self.ends: list[int] = []
        """Ids that end an answer, besides those of the model's generation config."""

    def load(self) -> Engine:
        """Load the weights into an engine, all frozen. Raises `DamagedCheckpoint` for those of a damaged one."""
        refuse_damaged_weights(self._folder)
        source = pretrained_source(self._folder, trains=False, trust_remote_code=self._trusted, base=self._base)
        freeze_parameters(source.model, ("*",))
        if left_out := source.left_out():
            self.notice(f"left out: {printable(left_out)}")
        return Engine.from_source(source, progress=self._progress, device=self._device, precision=self._precision)

    def room(self, length: int, wanted: int | None) -> int:
        """Most new tokens after a prompt of `length` tokens. Raises `BatchError` if the `wanted` ones do not fit."""
        if self.positions is None:
            return USUAL_NEW_TOKENS if wanted is None else wanted
        room = self.positions - length
        if room < 1 or room < (wanted or 0):
            what = f"a prompt of {length:,} tokens" + (f" and {wanted:,} new ones" if wanted and room > 0 else "")
            fix = f"ask for at most {room:,} new ones" if room > 0 else "use a shorter prompt"
            raise BatchError(f"{what}: more than the model's {self.positions:,} positions", where=WHERE, fix=fix)
        return min(USUAL_NEW_TOKENS, room) if wanted is None else wanted


def run_generation(
    model: GenerationModel, prompt: str, heard: Callable[[str], None], sampling: Sampling | None = None
) -> Spoken:
    """Continue `prompt`, calling `heard` with new text as it comes.

    An empty prompt starts a new document. Special tokens written out in the prompt are parsed as such. Text passed to
    `heard` has terminal control characters removed.

    Raises `ModelError` for bad weights, `DataError` or `BatchError` for a prompt that is malformed or too long, and
    `ConfigError` for a bad setting.
    """
    sampling = sampling or Sampling()
    ids = prompt_ids(model.tokenizer, prompt)
    sampling = replace(sampling, most=model.room(len(ids), sampling.most))
    with model.load() as engine:
        return _say(model, engine, ids, sampling, heard)


def run_chat(
    model: GenerationModel,
    questions: Iterable[str],
    heard: Callable[[str], None],
    sampling: Sampling | None = None,
    *,
    system: str = "",
) -> None:
    """Answer questions one after another, each by itself, with the model's own chat template. An answer ends with a
    newline; the next question is taken from the iterable when it is complete.

    Raises as `run_generation`, and `DataError` if there is no chat template or it rejects a question.
    """
    sampling = sampling or Sampling()
    template = _own_template(model)
    model.ends = turn_ends(template)
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    chat_prompt_ids([*first, {"role": "user", "content": "Hello"}], template)  # raises before the weights are loaded
    with model.load() as engine:
        for question in questions:
            ids = chat_prompt_ids([*first, {"role": "user", "content": question}], template)
            _say(model, engine, ids, replace(sampling, most=model.room(len(ids), sampling.most)), heard)
            heard("\n")


def _own_template(model: GenerationModel) -> ChatTemplate:
    if not model.tokenizer.chat_template:
        where = str(model.tokenizer.name_or_path)
        raise DataError("has no chat template", where=where, fix="leave --chat out, or train it on chats first")
    return choose_template(model.tokenizer)


def _say(
    model: GenerationModel, engine: Engine, ids: Sequence[int], sampling: Sampling, heard: Callable[[str], None]
) -> Spoken:
    pieces: list[str] = []

    def listen(text: str) -> None:
        pieces.append(printable(text))
        heard(pieces[-1])

    began = time.perf_counter()
    streamer = TextStream(model.tokenizer, listen)
    new = draw_ids(engine, model.tokenizer, ids, sampling, ends=model.ends, streamer=streamer)
    return Spoken("".join(pieces), len(new), time.perf_counter() - began)
