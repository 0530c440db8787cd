"""Every error that MegaTrain raises on purpose, in one tree.

    MegaTrainError
      ConfigError          a key, a value or a command-line argument
      ModelError           a model that cannot be trained here, or not by this engine
      DataError            a source, a tokenizer or a dataset
        SampleError        one sample: a missing field, a role that the template refuses
        BatchError         one micro-batch: ids outside the vocabulary, no target token
      LossError            a loss function that returns what no step can go down
      PlanError            a policy that contradicts itself
        DoesNotFit         a policy that needs more memory than a tier has
      ScheduleError        a schedule that `check` refused
      DeviceError          a device that is missing or misused
        OutOfDeviceMemory  an allocation beyond the capacity of a tier
        StreamFailed       an op that raised on a stream; `__cause__` holds the original
        Deadlock           work that can never start, or never ends
        RaceDetected       two accesses of the same bytes that nothing orders
        BrokenPromise      an op that touched memory which it had not declared
        DiskError          scratch files that cannot be made, read or written
          DiskFull         more bytes than a disk has left
          CorruptRegion    bytes on a disk that are not the ones that were written
      NonFinite            a loss or a gradient that is not finite
      ExportError          a folder that could not be written
      CheckpointError      a checkpoint that could not be written, read or removed
        DamagedCheckpoint  one that is not whole, or not what was written

Each says what is wrong, where, and what to do. The command line prints exactly that, on one line, and exits with 2;
a traceback means a defect of ours. What others raise is told in a line too (`first_line`, `typed_line`). The module
leaves out logging and exit codes: see `cli.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, RuntimeError)
"""Exceptions of code that trips over something; what they say means little without their names."""


LONGEST_LINE = 300
"""Characters of what an exception of another library says; some list every model that they know."""


def first_line(error: BaseException) -> str:
    """What an exception of another library says, in one line without a full stop; its type's name where it is silent.

    That is its first line, with the second one where the first only introduces it, and with the type's name before it
    where the text means little alone.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")
    said = said if len(said) <= LONGEST_LINE else f"{said[:LONGEST_LINE]}..."
    return f"{type(error).__name__}: {said}" if isinstance(error, _NAMED) else said


def typed_line(error: BaseException) -> str:
    """As `first_line`, with the type's name before it whatever the type."""
    said, name = first_line(error), type(error).__name__
    return said if said == name or said.startswith(f"{name}: ") else f"{name}: {said}"


def _remade(kind: type[BaseException], args: tuple[object, ...], held: dict[str, object]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(held)
    return error


class MegaTrainError(Exception):
    """Base of all: `what` is wrong, `where` it was met, and what to do about it (`fix`)."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what)

    def __reduce__(self) -> tuple[object, ...]:
        """So that it can be raised in one process and told in another, whatever its arguments are."""
        return _remade, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.fix}" if self.fix else text


class ConfigError(MegaTrainError):
    """A configuration key or value, or a command-line argument, is wrong."""


class ModelError(MegaTrainError):
    """The model cannot be loaded, is not a causal language model, or cannot be streamed exactly."""


class DataError(MegaTrainError):
    """A data source, a tokenizer or a dataset is missing, empty or malformed."""


class SampleError(DataError):
    """One sample is unusable. `reason`: the few words under which such samples are counted where they are left out."""

    def __init__(self, what: str, *, reason: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.reason = reason


class BatchError(DataError):
    """One micro-batch is unusable: ids outside the vocabulary, wrong shapes, no target token."""


class LossError(MegaTrainError):
    """A loss function returned no scalar, or one that does not depend on what it was given."""


class PlanError(MegaTrainError):
    """A policy contradicts itself or the model."""


class DoesNotFit(PlanError):
    """A policy needs more memory than a tier has; nothing has been allocated."""


class ScheduleError(MegaTrainError):
    """`schedule.check` refused a schedule; the text shows the ops around the culprit."""


class DeviceError(MegaTrainError):
    """A device is missing, unknown or misused."""


class OutOfDeviceMemory(DeviceError):
    """An allocation went beyond the capacity of a tier; the text holds the table of owners."""


class StreamFailed(DeviceError):
    """An op raised on a stream. `__cause__` is the original exception."""


class Deadlock(DeviceError):
    """Nothing can run any more; the text says who waits for whom."""


class RaceDetected(DeviceError):
    """Two conflicting accesses without an order; the text names both ops, the bytes and the missing wait.

    `buffer`, `start`, `stop` (bytes) and `content` say where, and `tasks` which two, so that a caller who knows layout
    and schedule can name the parameter and the ops' numbers.
    """

    def __init__(
        self,
        what: str,
        *,
        buffer: str,
        start: int,
        stop: int,
        content: object,
        tasks: tuple[object, object],
        where: str = "",
        fix: str = "",
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.buffer, self.start, self.stop, self.content, self.tasks = buffer, start, stop, content, tasks


class BrokenPromise(DeviceError):
    """An op read or wrote memory outside what it declares."""


class RankError(MegaTrainError):
    """Another of several ranks has failed, is gone, or was called otherwise than this one."""


class DiskError(DeviceError):
    """A folder for scratch files is missing or refused, or a drive failed to read or write."""


class DiskFull(DiskError):
    """A disk has less space left than is needed."""


class CorruptRegion(DiskError):
    """What a disk holds of a region is not what was written, or was never written whole."""


class NonFinite(MegaTrainError):
    """A loss or a gradient is not finite. The text says which units, if any, had been updated already.

    parameters: names of weights that are not finite themselves; no step will be as long as they are what they are.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", parameters: Sequence[str] = ()) -> None:
        super().__init__(what, where=where, fix=fix)
        self.parameters = tuple(parameters)


class ExportError(MegaTrainError):
    """A model folder could not be written; nothing half-written is left behind."""


class CheckpointError(MegaTrainError):
    """A checkpoint could not be written, read or removed; others are as they were, and nothing is left half-written."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is unfinished, or its files are not those that were written; or a newer version wrote it."""
