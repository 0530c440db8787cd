"""Check before planning that the disks have room for a run's files.

Counts one checkpoint (float32 masters and what the optimizer keeps) and the final model, both with what is carried
over to them, per file system; files of an earlier run that will be replaced count as free. Each save checks
again, exactly. Further checkpoints, which are skipped with a message if there is no room, are warned of. Not counted:
the disk tier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megatrain.checkpoint.listing import checkpoints
from megatrain.checkpoint.load import Checkpoint
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.formatting import at_least, at_most
from megatrain.model import PortedModel, carried_by, written_parameters, written_precision
from megatrain.plan.host_resources import available_disk_nbytes
from megatrain.spec.numerics import WEIGHT_NBYTES
from megatrain.system.paths import nearest_folder


def refuse_full_disk(config: Config, ported: PortedModel, resumed: Checkpoint | None) -> None:
    """Raise `ConfigError` if there is no room for a checkpoint (if any are to be written) and the model."""
    needs = [(config.folder, model_nbytes(config, ported), "the model", "output.folder")]
    if config.checkpoint.every:
        state = state_nbytes(ported) + constant_nbytes(ported)
        needs.insert(0, (config.checkpoints, state, "a checkpoint", "checkpoint.folder or output.folder"))
    together = defaultdict(list)
    for need in needs:
        together[nearest_folder(need[0]).stat().st_dev].append(need)
    for on_one_disk in together.values():
        folder, _, _, key = on_one_disk[0]
        needed = sum(nbytes for _, nbytes, _, _ in on_one_disk)
        free = available_disk_nbytes(nearest_folder(folder))
        if resumed is None and any(each == config.checkpoints for each, _, _, _ in on_one_disk):
            free += _nbytes_in(checkpoints(config.checkpoints))
        if free < needed:
            names = " and ".join(name for _, _, name, _ in on_one_disk)
            what = f"has {at_most(free)} free, but about {at_least(needed)} are needed for {names}"
            raise ConfigError(what, where=str(folder), fix=f"free some space, or choose another {key}")


def checkpoint_space_warning(config: Config, ported: PortedModel, steps: int) -> str:
    """The warning if the disk lacks room for all checkpoints that a run of `steps` steps keeps at one time, else ""."""
    section, folder = config.checkpoint, nearest_folder(config.checkpoints)
    if not section.every:
        return ""
    kept = section.keep_last + section.keep_best + (steps // section.keep_every if section.keep_every else 0)
    held = min(kept + 1, -(-steps // section.every))  # an old one stays until the new one is complete
    room = available_disk_nbytes(folder) + _nbytes_in(checkpoints(config.checkpoints))
    if folder.stat().st_dev == nearest_folder(config.folder).stat().st_dev:
        room -= model_nbytes(config, ported)
    fits = max(0, (room - constant_nbytes(ported)) // state_nbytes(ported))
    if fits >= held:
        return ""
    fix = "free some space" if kept == 1 else "free some space, or keep fewer (checkpoint.keep_last)"
    return f"{config.checkpoints} has room for {fits} of the {held} checkpoints held at one time; {fix}"


def state_nbytes(ported: PortedModel) -> int:
    """Bytes of the trained parameters in a checkpoint: float32 masters, and what the optimizer keeps."""
    params = (param for unit in ported.structure.units for param in unit.params if param.trainable)
    return sum(4 * param.numel * (1 + len(param.state)) for param in params)


def constant_nbytes(ported: PortedModel) -> int:
    """Bytes of a checkpoint that do not change in training, so that later checkpoints link to the same files: frozen
    masters, and tensors that are carried over. Zero for an adapter, whose checkpoints leave them out."""
    frozen = ported.structure.numel - ported.structure.trained_numel
    return 0 if ported.adapter is not None else 4 * frozen + _carried_nbytes(ported)


def model_nbytes(config: Config, ported: PortedModel) -> int:
    """Bytes of the tensors that the run exports: the whole model, or an adapter with what `peft` saves beside it."""
    written = written_parameters(ported)
    numel = sum(param.numel for unit in ported.structure.units for param in unit.params if param.name in written)
    nbytes = numel * WEIGHT_NBYTES[config.output.precision or written_precision(ported)]
    return nbytes if ported.adapter is not None else nbytes + _carried_nbytes(ported)


def _carried_nbytes(ported: PortedModel) -> int:
    return sum(tensor.nbytes for tensor in carried_by(ported.skeleton).tensors)


def _nbytes_in(folders: Iterable[Path]) -> int:
    """Bytes of the files in these folders; a file with several hard links counts once."""
    files = (path.stat() for folder in folders for path in folder.rglob("*") if path.is_file())
    return sum({file.st_ino: file.st_size for file in files}.values())
