"""Build a run's data loader from the sources in its configuration, and describe the data to the user.

Each source is plain text or samples (`data.detect_kind`). Plain texts form one stream of windows, as in pre-training,
unless they have weights. Samples stay whole: several per row if the model can keep them apart, else one per row, in
batches of similar length. Impossible requests are refused; open choices are made here and reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from megatrain.config import Config, DataSection, TrainSection, called
from megatrain.data.detect_kind import (
    begins_with_text,
    has_splits,
    holds_samples,
    is_described,
    is_of_hub,
    source_called,
)
from megatrain.data.encode import EncodeOptions, Encoder, try_to_render, turn_ends
from megatrain.data.files import STDLIB
from megatrain.data.loader import Batch, Loader, batch_of, evaluation_batches, source_seed
from megatrain.data.packing import Batching, PackedRows, Reference, SampleRows, copies, split_samples
from megatrain.data.processor import Processor, load_processor, refuse_without_tower
from megatrain.data.sample_cache import EncodingProgress, SampleFile, prepare_samples
from megatrain.data.sample_sources import Source
from megatrain.data.stream_rows import BLOCK_ROWS, Packing, StreamRows
from megatrain.data.text_sources import describe_tokens, pack, prepare_tokens, split_windows, unused_tokens
from megatrain.data.token_files import TokenFile
from megatrain.data.tokenizer import Tokenizer
from megatrain.dist import ALONE, World
from megatrain.dist.world import refuse_unlike
from megatrain.errors import ConfigError, DataError, ModelError
from megatrain.formatting import counted
from megatrain.model import only_single_rows, why_not_packable
from megatrain.model.forward_arguments import arguments_of
from megatrain.model.profile_prologue import longer
from megatrain.plan import Plan
from megatrain.run.early_checks import schema_of
from megatrain.system.paths import usable_path

HELD_OUT_BATCHES = 16
"""Default number of micro-batches of held-out data for the validation loss."""
KTO_BALANCE = (1.0, 1.34)
"""Ratio of weighted good answers to weighted bad ones that KTO's authors advise (equation 8): 1 to 4/3."""
EXAMPLE_CHARACTERS = 1200
"""Most characters of the example that is shown, about a page."""


@dataclass(frozen=True)
class Corpus:
    loader: Loader
    validation: Validation
    window: int
    """Tokens of the longest row."""
    facts: list[tuple[str, str]]
    """Description for the user: (name, fact)."""
    example: list[tuple[str, bool]] = field(default_factory=list)
    """The first sample as (text, whether it is trained) pieces; empty for plain text."""
    chats: Encoder | None = None
    """Chat template that turns conversations into ids; `None` if the data has none."""
    begun: Mapping[str, Any] = field(default_factory=dict)
    """What a resumed run takes over. moment: when the run first rendered its chats, in ISO format: templates that write
    the date write this one. stops: the ids at which the model stopped generating before the run."""
    leading: list[int] = field(default_factory=list)
    """The ids that begin each plain text."""
    ends: list[int] = field(default_factory=list)
    """The ids that end what is trained: an answer, a call of a function, a text."""

    @property
    def has_images(self) -> bool:
        return any(isinstance(each, SampleRows) and each.processor is not None for each in self.loader.sources)

    def first_batch(self) -> Batch:
        """A validation batch, or if there is none, a training batch."""
        every = [*self.validation.sources.values(), *self.loader.sources]
        if isinstance(every[0], StreamRows):
            return batch_of([every[0].row(number) for number in range(self.loader.micro_batch)])
        return next(evaluation_batches(every[0], self.loader.micro_batch))

    def first_prompt(self) -> list[int]:
        """The ids before the first trained token of `first_batch`; none for plain text."""
        if not self.example:
            return []
        batch = self.first_batch()
        ids: list[int] = batch["input_ids"][0, : int((batch["labels"][0] == -100).cumprod(0).sum())].tolist()
        return ids


@dataclass(frozen=True)
class Validation:
    sources: Mapping[str, Batching]
    micro_batch: int
    limit: int | None = None
    """Number of micro-batches, from all sources in turn."""

    @property
    def identity(self) -> str:
        """JSON that identifies the data measured, to detect changes on resume."""
        return json.dumps([[each.rows.identity, each.count] for each in self.batches().values()])

    def batches(self) -> dict[str, Measured]:
        """The micro-batches of each source, which can be iterated repeatedly and are not kept in memory."""
        counts = {name: -(-len(rows) // self.micro_batch) for name, rows in self.sources.items()}
        if self.limit is not None:
            turns = sorted((turn, place, name) for place, name in enumerate(counts) for turn in range(counts[name]))
            numbers = Counter(name for _, _, name in turns[: self.limit])
            counts = {name: numbers[name] for name in counts if numbers[name]}
        return {name: Measured(self.sources[name], self.micro_batch, count) for name, count in counts.items()}


@dataclass(frozen=True)
class Measured:
    """The first `count` micro-batches of a source, read anew each time."""

    rows: Batching
    micro_batch: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return evaluation_batches(self.rows, self.micro_batch, self.count * self.micro_batch)


@dataclass(frozen=True)
class _Part:
    training: Batching
    held_out: Batching | None
    facts: list[tuple[str, str]]
    example: list[tuple[str, bool]] = field(default_factory=list)
    holds_chats: bool = False
    name: str = ""
    """Name under which its loss is reported."""


@dataclass(frozen=True)
class Encoding:
    """How a run's samples are encoded. begun: `Corpus.begun` of a run that is resumed. progress: is told of it."""

    begun: Mapping[str, Any] | None = None
    progress: EncodingProgress | None = None

    @property
    def prepare(self) -> Callable[..., SampleFile]:
        """`prepare_samples`, which tells `progress`."""
        return partial(prepare_samples, progress=self.progress)


def open_corpus(
    config: Config,
    plan: Plan,
    tokenizer: Tokenizer,
    vocabulary: int,
    model: Any,
    world: World = ALONE,
    encoding: Encoding = Encoding(),
) -> Corpus:
    """Open the data of a run, packed for the model and the plan's micro-batches; each rank gets its own share.

    config: with the sizes chosen by the plan. vocabulary: number of token ids of the model.

    Raises `DataError` for data that cannot be used, `ModelError` if the model cannot be trained as asked.
    """
    data, size = config.data, plan.micro_batch
    begun = as_begun(world, encoding.begun)
    moment = datetime.fromisoformat(begun["moment"])
    opened = _Opening(config, size, tokenizer, vocabulary, model, encoding.prepare, moment)
    parts = list(opened.parts())
    loader = Loader(
        [part.training for part in parts] if len(parts) > 1 else parts[0].training,
        micro_batch=size,
        micro_batches=config.train.gradient_accumulation_steps or plan.work.micro_batches,
        seed=config.train.seed,
        weights=data.weights,
        targets=config.train.target_tokens_per_step,
        part=(world.rank, world.size),
    ).read_ahead(data.workers)
    for stream in loader.streams:  # the hub may change between the requests of two ranks
        stream.use_commit(world.exchange("the commit of a data set", stream.commit)[0])
    separate = list(opened.validation())
    held_out = [(each.name, each.held_out) for each in parts if each.held_out is not None]
    sources = _distinct([*((each.name, each.training) for each in separate), *held_out])
    validation = Validation(sources, size, config.train.eval_batches or (None if separate else HELD_OUT_BATCHES))
    read: dict[str, object] = {f"source {index}": dict(each.identity) for index, each in enumerate(loader.sources)}
    refuse_unlike("reads", world.exchange("the data", {**read, "validation": validation.identity}))
    facts = [fact for part in parts for fact in part.facts]
    facts += _repeated(parts, opened.noun)
    facts += [("validation", _described(part, parts)) for part in separate]
    chats = opened.encoder if any(part.holds_chats for part in parts) else None
    if chats is not None:  # so that the saved model uses the template it was trained with
        opened.tokenizer.chat_template = chats.template.saved_text
    example = next((part.example for part in parts if part.example), [])
    if chats is not None and chats.dates:
        facts.append(("date", f"the chat template writes {', '.join(dict.fromkeys(chats.dates))}"))
    leading = opened.encoder.leading if data.bos else []
    ends = [] if chats is None else turn_ends(chats.template)
    if not all(part.holds_chats for part in parts) and tokenizer.eos_token_id is not None:
        ends = [*ends, opened.encoder.end_of_text]
    return Corpus(loader, validation, data.sequence_length, facts, example, chats, begun, leading, ends)


def as_begun(world: World, begun: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What a run takes over (`Corpus.begun`) of how it began; the present moment, if it begins now."""
    begun = {key: begun[key] for key in ("moment", "stops") if begun is not None and key in begun}
    now = begun.get("moment") or datetime.now().isoformat(timespec="seconds")
    return {**begun, "moment": world.exchange("the date", now)[0]}


def largest_image_row(
    config: Config, tokenizer: Tokenizer, vocabulary: int, model: Any, encoding: Encoding
) -> dict[str, Any] | None:
    """The sample of a run whose images have the most tokens, as arguments of the model's forward: one padded row of
    `data.sequence_length`. `None` if there are no images. Arguments and errors: as for `open_corpus`;
    `encoding` has what the run began with."""
    data = config.data
    if data.images is None:
        return None
    assert encoding.begun is not None
    moment = datetime.fromisoformat(encoding.begun["moment"])
    opened = _Opening(config, 1, tokenizer, vocabulary, model, encoding.prepare, moment)
    most, largest = 0, None
    for split, names in ((data.split, data.sources), (data.validation_split, data.validation.values())):
        opened.split = split
        for file in (opened.prepared(name) for name in names if opened.holds_samples(name)):
            assert opened.processor is not None
            counts = file.counts(opened.processor.image_token_id)
            if len(counts) and counts.max() > most:
                chosen = np.array([counts.argmax()])
                most, largest = int(counts.max()), SampleRows(file, chosen, 1, processor=opened.processor).row(0)
    if largest is None:
        return None
    row = batch_of([largest])
    del row["labels"]
    row.setdefault("attention_mask", row["input_ids"].new_ones(row["input_ids"].shape))
    padded = longer(row, data.sequence_length - row["input_ids"].shape[1])
    padded["attention_mask"][:, -1] = 0  # a shorter row is beside others
    return padded


def _distinct(named: Iterable[tuple[str, Batching]]) -> dict[str, Batching]:
    by_name: dict[str, Batching] = {}
    for name, rows in named:
        number = next(number for number in count(1) if (name if number == 1 else f"{name} {number}") not in by_name)
        by_name[name if number == 1 else f"{name} {number}"] = rows
    return by_name


def _repeated(parts: Sequence[_Part], noun: str) -> list[tuple[str, str]]:
    """Lines about samples with equal tokens: duplicates among the training data, and between it and held-out data."""
    known = [(part, rows.hashes) for part in parts if isinstance(rows := part.training, PackedRows | SampleRows)]
    if not known:
        return []
    hashes = [each for _, each in known]
    repeats = [(part.name, *both) for (part, _), both in zip(known, copies(hashes), strict=True)]
    told = [f"{within:,} within {name}" for name, within, _ in repeats if within]
    told += [f"{across:,} of {name} in others" for name, _, across in repeats if across]
    number, repeat = sum(within + across for _, within, across in repeats), "repeat"
    repeat += "s" if number == 1 else ""
    whole = counted(sum(map(len, hashes)), noun)
    facts = [f"{number:,} of {whole} {repeat} another ({', '.join(told)})"] if number else []
    for part, _ in known:
        both = _shared(part.held_out, parts)
        occur = "occurs" if both == 1 else "occur"
        facts += [f"{both:,} of the {noun}s held out of {part.name} also {occur} in training data"] if both else []
    return [("duplicates", "; ".join(facts))] if facts else []


def _shared(rows: Batching | None, trained: Sequence[_Part]) -> int:
    """How many samples of `rows` also occur in the training data."""
    known = [each.training for each in trained if isinstance(each.training, PackedRows | SampleRows)]
    if not known or not isinstance(rows, PackedRows | SampleRows):
        return 0
    return int(np.isin(rows.hashes, np.concatenate([each.hashes for each in known])).sum())


def _described(part: _Part, trained: Sequence[_Part]) -> str:
    """Describe a validation source, and how many of its samples also occur in the training data."""
    words = f"{part.name}: {part.facts[0][1]}, {counted(len(part.training), 'row')}"
    both = _shared(part.training, trained)
    return f"{words}; {both:,} of its samples {'is' if both == 1 else 'are'} trained on too" if both else words


class _Opening:
    def __init__(
        self,
        config: Config,
        micro_batch: int,
        tokenizer: Tokenizer,
        vocabulary: int,
        model: Any,
        prepare: Callable[..., SampleFile],
        moment: datetime,
    ) -> None:
        """prepare: `prepare_samples` with its options bound. moment: see `Encoder`."""
        self.config, self.data, self.micro_batch = config, config.data, micro_batch
        self.tokenizer, self.vocabulary, self.model = tokenizer, vocabulary, model
        self.cache, self.split, self.fraction = config.data.cache_folder, self.data.split, self.data.validation_fraction
        self.prefers, self.unpaired = config.train.prefers, config.train.objective == "kto"
        self.noun = "pair" if self.prefers and not self.unpaired else "sample"
        self.schema, self.prepare = schema_of(config), prepare
        self.moment = moment
        self.processor = None if self.data.images is None else self._processor_of(model)
        self.encoder = Encoder(tokenizer, _options(self.data, self.data.sequence_length), moment, self.processor)
        self._packs: bool | None = None

    def _processor_of(self, model: Any) -> Processor:
        """The processor of the model's images, whose chat template the tokenizer gets."""
        processor = load_processor(self.config.tokenizer)
        refuse_without_tower(processor, type(model).__name__, arguments_of(model, ()))
        if processor.chat_template:
            self.tokenizer.chat_template = processor.chat_template
        return processor

    def validation(self) -> Iterator[_Part]:
        """The sources of `data.validation`, each as a whole."""
        self.split, self.fraction = self.data.validation_split, 0.0
        for name, source in self.data.validation.items():
            part = self._samples(source) if self.holds_samples(source) else self._windows([source])
            yield replace(part, name=name)

    def parts(self) -> Iterator[_Part]:
        """The training sources in order; plain texts without weights are joined at the position of the first."""
        data = self.data
        if data.streaming:
            self._refuse_unread(has_samples=True)
            yield from (self._stream(name, number) for number, name in enumerate(data.sources))
            return
        rich = [self.holds_samples(name) for name in data.sources]
        self._refuse_unread(any(rich))
        texts = [name for name, is_rich in zip(data.sources, rich, strict=True) if not is_rich]
        for name, is_rich in zip(data.sources, rich, strict=True):
            if is_rich:
                yield self._samples(name)
            elif data.weights is not None:
                yield self._windows([name])
            elif texts:
                yield self._windows(texts)
                texts = []

    def _refuse_unread(self, has_samples: bool) -> None:
        """Raise `ConfigError` for a key that is set but has no effect on any of the sources."""
        named = [name for name in self.data.sources if not is_described(name)]
        reads = {
            "columns": (bool(named) and has_samples, "samples"),
            "images": (bool(named) and has_samples, "samples"),
            "tags": (bool(named) and has_samples, "samples"),
            "chat_template": (has_samples, "samples"),
            "chat_template_kwargs": (has_samples, "samples"),
            "split": (any(map(has_splits, named)), "a data set on the hub or a saved one"),
            "validation_split": (any(map(has_splits, self.data.validation.values())), "a data set with splits"),
            "subset": (any(map(is_of_hub, named)), "a data set on the hub"),
        }
        for key, (is_read, by) in reads.items():
            if not is_read and getattr(self.data, key) != DataSection.model_fields[key].default:
                what = f"applies only to {by}, and there is no such source"
                raise ConfigError(what, where=f"data.{key}", fix=f"leave data.{key} out, or name such a source")

    def holds_samples(self, name: str) -> bool:
        whole = self.data.packing in ("best_fit", "grouped")
        has_samples = holds_samples(name, self.schema, self.data.pattern)
        if whole and not has_samples:
            if not usable_path(name, where="data.sources").exists():
                what = "plain text can be kept whole only if it comes from files"
                raise ConfigError(what, where="data.packing", fix="set data.packing=windows")
            return True
        return has_samples

    def prepared(self, name: str) -> SampleFile:
        """The encoded samples of a source of chats."""
        return self._prepared(self._source(name), self.encoder)

    def _source(self, name: str) -> Source:
        data = self.data
        return source_called(name, self.schema, split=self.split, subset=data.subset, pattern=data.pattern)

    def _prepared(self, source: Source, encoder: Encoder) -> SampleFile:
        return self.prepare(source, encoder, cache=self.cache, bad=self.data.bad_samples)

    def _windows(self, names: list[str]) -> _Part:
        data = self.data
        file = prepare_tokens(
            names, self.tokenizer, cache=self.cache, pattern=data.pattern, bos=data.bos, bad=data.bad_samples
        )
        first, *others = describe_tokens(file)
        return self._cut(names, file, first + self._beginning() if "documents" in file.details else first, others)

    def _beginning(self) -> str:
        """What is said of plain texts if the tokenizer puts something before a text."""
        which = "each begins" if self.data.bos else "none begins"
        leading = self.encoder.leading
        return f"; {which} with {self.tokenizer.decode(leading)} (data.bos)" if leading else ""

    def _cut(self, names: list[str], file: TokenFile, described: str, others: Iterable[str] = ()) -> _Part:
        try:
            windows = pack(file, window=self.data.sequence_length, vocab_size=self.vocabulary)
            training, held_out = split_windows(windows, self.fraction)
        except DataError as error:
            if error.where == str(file.path):  # a cache file, whose name means nothing to the user
                error.where = ", ".join(names)
            raise
        held = f"{len(held_out):,} held out" if held_out else "none held out"
        length = self.data.sequence_length
        cut = f"{len(windows):,} of {length:,} tokens, {held}; {counted(unused_tokens(windows), 'token')} unused"
        facts = [("data", described), *(("", line) for line in others), ("sequences", cut)]
        return _Part(training, held_out, facts, name=" and ".join(map(called, names)))

    def _samples(self, name: str) -> _Part:
        data = self.data
        source = self._source(name)
        runs_on = data.packing == "windows" or (data.packing == "auto" and begins_with_text(source))
        encoder = Encoder(self.tokenizer, _options(data, None), self.moment) if runs_on else self.encoder
        whole = self._prepared(source, encoder)
        whole.tokens.require_ids_below(self.vocabulary)
        self._refuse_other_kind(whole, name)
        first, *others = whole.details["report"]
        if runs_on:
            if not whole.details["text_only"]:
                what = f"{name} holds samples, which windows would cut anywhere and train including prompts"
                raise ConfigError(what, where="data.packing", fix="use best_fit or grouped")
            return self._cut([name], whole.tokens, f"{first}, of {name}{self._beginning()}")
        training, held_out, packing_words, copies = self._rows(whole)
        held = f"{counted(len(held_out.chosen), self.noun)} held out" if held_out else "none held out"
        held += f", {copies:,} kept for training because of duplicates" if copies else ""
        mean = whole.lengths.mean() if self.prefers else whole.lengths[training.chosen].mean()
        rows = f"{counted(len(training), 'row')} of {mean:,.0f} tokens"
        if isinstance(training, PackedRows):
            rows = f"{counted(len(training), 'row')} of {data.sequence_length:,} tokens"
        packing = f"{packing_words}: {rows}, {training.efficiency:.1%} of them filled; {held}"
        others += [_balance(whole, self.config.train)] if self.unpaired else []
        texts = self._beginning() if whole.details["text_only"] else ""
        facts = [("data", f"{first}, of {name}{texts}"), *(("", line) for line in others), ("packing", packing)]
        return _Part(training, held_out, facts, whole.details["example"], whole.details["chats"], called(name))

    def _stream(self, name: str, number: int) -> _Part:
        """A streamed source, of which only the first block is known."""
        data, window, seed = self.data, self.data.sequence_length, source_seed(self.config.train.seed, number)
        if name == STDLIB:
            what, fix = f"{STDLIB} cannot be streamed", "leave data.streaming out"
            raise ConfigError(what, where="data.sources", fix=fix)
        source = self._source(name)
        runs_on = data.packing == "windows" or (data.packing == "auto" and begins_with_text(source))
        packing: Packing = "windows" if runs_on else "best_fit" if self._can_pack() else "grouped"
        encoder = Encoder(self.tokenizer, _options(data, None), self.moment) if runs_on else self.encoder
        micro_batch, bad = self.micro_batch, data.bad_samples
        rows = StreamRows(source, encoder, packing, window=window, micro_batch=micro_batch, seed=seed, bad=bad)
        rows.row(0)
        first, *others = rows.statistics.lines()
        texts = self._beginning() if runs_on else ""
        facts = [("data", f"the stream of {name} begins with {first}{texts}"), *(("", line) for line in others)]
        blocks = f"in blocks of {BLOCK_ROWS:,} samples or more, in a seeded order within each"
        facts.append(("packing", f"{packing}: {blocks}"))
        example = [] if rows.first is None or runs_on else try_to_render(rows.first, encoder)
        return _Part(rows, None, facts, example, rows.holds_chats, called(name))

    def _refuse_other_kind(self, file: SampleFile, name: str) -> None:
        """Raise `ConfigError` for samples of a kind that the objective does not train on."""
        needs_pairs = self.prefers and not self.unpaired
        if (file.details["pairs"], file.details["unpaired"]) == (needs_pairs, self.unpaired):
            return
        what, fix = (
            f"{name} holds preferences",
            "set train.objective=dpo (orpo, simpo) or data.format, or name other sources",
        )
        if file.details["unpaired"]:
            what, fix = f"{name} holds answers with labels", "set train.objective=kto, or name other sources"
        elif self.prefers:
            needs = "answers with labels" if self.unpaired else "chosen and rejected answers"
            what, fix = f"{name} holds no preferences", f"name sources with {needs}"
        raise ConfigError(what, where="data.sources", fix=fix)

    def _rows(self, file: SampleFile) -> tuple[PackedRows | SampleRows, PackedRows | SampleRows | None, str, int]:
        """(training rows, held-out rows, how they are packed, number not held out because they have duplicates)."""
        size = 2 if self.prefers else 1
        training, held_out, copies = split_samples(file, self.fraction, size)
        if size > (together := self.config.train.rows_together):  # KTO answers without mismatched rows
            training, held_out, size = size * training, size * held_out, together
        both, rows = (training, held_out), list[PackedRows | SampleRows]()
        if not self.prefers and self._can_pack():
            packing = "best fit"
            rows += [PackedRows(file, chosen, self.data.sequence_length, self.config.train.seed) for chosen in both]
        else:
            of = "an answer and a mismatched one in two rows" if self.unpaired else "a pair in two rows"
            packing = f"{of if size == 2 else 'one sample to a row'}, like lengths together"
            reference = Reference()
            rows += [SampleRows(file, chosen, self.micro_batch, size, reference, self.processor) for chosen in both]
        return rows[0], rows[1] if len(held_out) else None, packing, copies

    def _can_pack(self) -> bool:
        if self.data.packing == "grouped" or self.processor is not None:
            return False
        if self._packs is None:
            reason = self._why_not()
            if reason and self.data.packing == "best_fit":
                fix = "set data.packing=grouped, or another model.attention"
                raise ModelError(f"cannot be trained on packed samples: {reason}", where="data.packing", fix=fix)
            self._packs = not reason
        return self._packs

    def _why_not(self) -> str:
        kernel = str(self.model.config._attn_implementation)
        if only_single_rows(kernel) and self.micro_batch > 1:
            return f"{kernel} tells them apart only in micro-batches of one row (set train.micro_batch_size=1)"
        return why_not_packable(self.model.config, type(self.model), kernel)


def _balance(file: SampleFile, train: TrainSection) -> str:
    """Describe the numbers of good and bad answers, and how the weights balance them."""
    good = int(file.marks[::2].sum())
    bad = len(file) // 2 - good
    words = f"{counted(good, 'good answer')}, {counted(bad, 'bad one')}"
    if not good or not bad:
        return words
    ratio = train.kto_desirable_weight * good / (train.kto_undesirable_weight * bad)
    least, most = KTO_BALANCE
    if least <= ratio <= most:
        return words
    return f"{words}; weighted {ratio:.2g} to 1, where {least:g} to {most:g} is advised"


def _options(data: DataSection, max_tokens: int | None) -> EncodeOptions:
    return EncodeOptions(
        train_on=data.train_on,
        max_tokens=max_tokens,
        too_long=data.too_long,
        template=data.chat_template,
        template_values=data.chat_template_kwargs,
        bos=data.bos,
    )


def shortened(runs: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    left = EXAMPLE_CHARACTERS
    short: list[tuple[str, bool]] = []
    for text, trained in runs:
        if left <= 0:
            return [*short, (" ...", False)]
        short.append((text[:left], trained))
        left -= len(text)
    return short
