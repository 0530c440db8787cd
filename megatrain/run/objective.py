"""The loss of a run, and the reference log-probabilities that DPO and KTO need before training.

The reference is the model that the run begins with, or the base below its adapter. Its log-probabilities of all answers
are computed once, by the streaming forward, and cached beside the tokenized data under a hash of weights, samples and
whatever affects rounding. A copy in the run folder serves resumed runs, whose model is no longer the reference. Ranks
share the computation; only rank 0 reads and writes files.

Not supported: another model as the reference, or a moving one. All pairs are computed, even if the run ends sooner.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatrain.checkpoint.load import Checkpoint
from megatrain.config import Config
from megatrain.data.loader import Batch, batch_of
from megatrain.data.packing import SampleRows
from megatrain.data.sample_cache import SampleFile
from megatrain.dist import World
from megatrain.errors import CheckpointError, DataError
from megatrain.losses import DPO, KTO, ORPO, LossFn, SimPO
from megatrain.memory.checksum import checksum
from megatrain.plan import Plan
from megatrain.run.data import Corpus
from megatrain.run.ranks import own_of
from megatrain.system.locks import alone
from megatrain.system.paths import written_or_refused
from megatrain.train.engine import Engine

FORMAT = 2  # part of the cache key: increase it when the same content would give other numbers
FILE = "reference.npz"
"""File in the run folder: a data set's fingerprint -> float32[samples]."""

Said = dict[str, npt.NDArray[np.float32]]


def loss_of(config: Config) -> LossFn | None:
    train = config.train
    given = {} if train.beta is None else {"beta": train.beta}
    match train.objective:
        case "cross_entropy":
            return None
        case "dpo":
            return DPO(**given, label_smoothing=train.dpo_label_smoothing, loss_type=train.dpo_loss)
        case "orpo":
            return ORPO(**given)
        case "simpo":
            return SimPO(**given, gamma=train.simpo_gamma)
        case "kto":
            weights = train.kto_desirable_weight, train.kto_undesirable_weight
            return KTO(train.beta or KTO.beta, *weights, loss_type=train.kto_loss)


def without_reference(batch: Batch) -> Batch:
    """The entries of a batch that the model itself reads."""
    return {key: value for key, value in batch.items() if key not in KTO.own}


def take_up_reference(
    config: Config,
    corpus: Corpus,
    engine: Engine,
    plan: Plan,
    resumed: Checkpoint | None,
    told: Callable[[int, int], None],
) -> None:
    """Add the reference's log-probability of each answer to the corpus; `told` is called with (done, total).

    Raises `CheckpointError` if a resumed run's reference is missing, `DataError` if the file cannot be written.
    """
    every = (*corpus.loader.sources, *corpus.validation.sources.values())
    sources = [rows for rows in every if isinstance(rows, SampleRows)]
    files = {rows.file.fingerprint: rows.file for rows in sources}
    saved, world = config.folder / FILE, engine.world
    if resumed is None:
        known = _asked(config, files, engine, plan, told)
    else:
        kept = resumed.folder.parent.parent / FILE  # in the folder of the run it resumes from
        known = _of_first(world, files, lambda: _read(saved) | _read(kept))
        if not known:
            what = "the reference model's log-probabilities are missing, or belong to other data"
            raise CheckpointError(what, where=str(saved), fix="put the file back, or begin a new run")
    _write_first(world, saved, known)
    for rows in sources:
        rows.reference.values = known[rows.file.fingerprint]


def _asked(
    config: Config, files: Mapping[str, SampleFile], engine: Engine, plan: Plan, told: Callable[[int, int], None]
) -> Said:
    """The log-probabilities for each file, from the cache or computed now."""
    weights, world, of_base = _digest(engine), engine.world, config.train.dpo_reference == "base"
    known: Said = {}
    for name, file in files.items():
        key = [FORMAT, weights, name, config.train.precision, plan.micro_batch, engine.parts.ported.spec.attention]
        key += ["base as it was"] * of_base  # files under the former key may be of a changed base
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        path = config.data.cache_folder / f"reference-{digest}.npz"
        with ExitStack() as held:
            said = _of_first(world, {name: file}, partial(_read, path))
            said = said or _of_first(world, {name: file}, partial(_read_alone, path, held))
            if not said:
                said = {name: _ask(engine, file, plan, told, of_base=of_base)}
                _write_first(world, path, said)
        known |= said
    return known


def _read_alone(path: Path, held: ExitStack) -> Said:
    """The file's content, read under a lock that this process keeps until `held` is closed."""
    held.enter_context(alone(path))
    return _read(path)


def _of_first(world: World, files: Mapping[str, SampleFile], find: Callable[[], Said]) -> Said:
    """What rank 0 finds for these files, broadcast to all ranks; nothing if it lacks any."""
    mine: list[Said] = []

    def look() -> bool:
        mine.append(find() if world.rank == 0 else {})
        return files.keys() <= mine[0].keys()

    if not world.agree("what the reference has said", look)[0]:
        return {}
    empty = {name: np.empty(len(file), np.float32) for name, file in files.items()}
    return {name: world.of_first(torch.from_numpy((empty | mine[0])[name])).numpy() for name in files}


def _ask(
    engine: Engine, file: SampleFile, plan: Plan, told: Callable[[int, int], None], *, of_base: bool
) -> npt.NDArray[np.float32]:
    """Each sample's summed log-probability, float32[samples], in batches of similar length.

    of_base: of the model without its adapter.
    """
    rows, world = SampleRows(file, np.arange(len(file)), plan.micro_batch), engine.world
    order = np.argsort(file.lengths.astype(np.int64), kind="stable")
    said = np.empty(len(file), np.float32)
    together = plan.micro_batch * plan.work.micro_batches * world.size
    for start in range(0, len(order), together):
        numbers = order[start : start + together]
        parts = np.split(numbers, range(plan.micro_batch, len(numbers), plan.micro_batch))
        mine = own_of(world, parts)
        asked = [without_reference(batch_of([rows.row(int(number)) for number in part])) for part in mine]
        log_probs = engine.log_probs(asked, of_base=of_base)
        said[np.concatenate(mine)] = torch.cat([each.sum(dim=1) for each in log_probs]).numpy()
        of_ranks = world.together(torch.from_numpy(said[numbers])).numpy()
        for index, part in enumerate(parts):
            said[part] = of_ranks[index % world.size][index * plan.micro_batch :][: len(part)]
        told(start + len(numbers), len(order))
    return said


def _digest(engine: Engine) -> str:
    """A hash of the name, shape and 64-bit checksum of every weight; checksums are taken at memory bandwidth."""
    digest = hashlib.sha256()
    for unit in engine.parts.ported.spec.units:
        for param in unit.params:
            weights = engine.weights[param.name].numpy().reshape(-1).view(np.uint8)
            words, rest = np.split(weights, [weights.size // 8 * 8])  # checksums are of 8-byte words
            digest.update(f"{param.name} {param.shape} {checksum([words])} {rest.tobytes().hex()}\n".encode())
    return digest.hexdigest()


def _read(path: Path) -> Said:
    """Content of a file; empty if it is missing or damaged."""
    try:
        with np.load(path) as held:
            return {name: held[name] for name in held.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return {}


def _write_first(world: World, path: Path, said: Said) -> None:
    """Write on rank 0; if that fails, all ranks raise."""
    world.agree("the file of the reference", lambda: _write(path, said) if world.rank == 0 else None)


def _write(path: Path, said: Said) -> None:
    fix = "free some space, or choose another folder"
    with written_or_refused(path, DataError, fix, makes_folder=True) as draft:
        np.savez(draft, **said)  # type: ignore[arg-type]  # our names never equal an option's
