"""All errors that MegaTrain raises deliberately, in one hierarchy.

    MegaTrainError
      ConfigError          a key, a value or a command-line argument
      ModelError           a model that cannot be trained here, or not by this engine
      DataError            a source, a tokenizer or a dataset
        SampleError        one sample: a missing field, a role that the template refuses
        BatchError         one micro-batch: ids outside the vocabulary, no target token
      LossError            a loss function whose result cannot be minimised
      PlanError            a policy that contradicts itself
        DoesNotFit         a policy that needs more memory than a tier has
      ScheduleError        a schedule that `check` refused
      DeviceError          a device that is missing or misused
        OutOfDeviceMemory  an allocation beyond the capacity of a tier
        StreamFailed       an op that raised on a stream; `__cause__` holds the original
        Deadlock           work that can never start, or never ends
        RaceDetected       two accesses of the same bytes that nothing orders
        BrokenPromise      an op that touched undeclared memory
        DiskError          scratch files that cannot be made, read or written
          DiskFull         more bytes than a disk has left
          CorruptRegion    bytes on a disk that differ from those written
      NonFinite            a loss or a gradient that is not finite
      ExportError          a folder that could not be written
      CheckpointError      a checkpoint that could not be written, read or removed
        DamagedCheckpoint  one that is incomplete, or has changed

Each says what is wrong, where, and what to do. The command line prints exactly that, on one line, and exits with 2; a
traceback means a bug of ours. Errors of other libraries are summarised in one line (`first_line`, `typed_line`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NAMED = (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, RuntimeError)
"""Exceptions whose text means little without their type's name."""


LONGEST_LINE = 300
"""Maximum characters of another library's message; some list every model that they know."""


def first_line(error: BaseException) -> str:
    """Another library's exception in one line without a full stop; its type's name if it has no text.

    That is the text's first line, plus the second if the first only introduces it, after the type's name if the
    text means little alone.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")
    said = said if len(said) <= LONGEST_LINE else f"{said[:LONGEST_LINE]}..."
    return f"{type(error).__name__}: {said}" if isinstance(error, _NAMED) else said


def typed_line(error: BaseException) -> str:
    """As `first_line`, always starting with the type's name."""
    said, name = first_line(error), type(error).__name__
    return said if said == name or said.startswith(f"{name}: ") else f"{name}: {said}"


def _remade(kind: type[BaseException], args: tuple[object, ...], held: dict[str, object]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(held)
    return error


class MegaTrainError(Exception):
    """Base class: `what` is wrong, `where`, and what to do about it (`fix`)."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what)

    def __reduce__(self) -> tuple[object, ...]:
        """Makes errors picklable whatever their arguments, to pass them between processes."""
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
    """One sample is unusable. `reason`: the short phrase under which such samples are counted when skipped."""

    def __init__(self, what: str, *, reason: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.reason = reason


class BatchError(DataError):
    """One micro-batch is unusable: ids outside the vocabulary, wrong shapes, no target token."""


class LossError(MegaTrainError):
    """A loss function returned no scalar, or one that does not depend on its inputs."""


class PlanError(MegaTrainError):
    """A policy contradicts itself or the model."""


class DoesNotFit(PlanError):
    """A policy needs more memory than a tier has; nothing has been allocated.

    needed: tier -> the exact number of bytes, which the text rounds up.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", needed: Mapping[str, int] | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.needed = dict(needed or {})


class ScheduleError(MegaTrainError):
    """`schedule.check` refused a schedule; the text shows the ops around the offending one."""


class DeviceError(MegaTrainError):
    """A device is missing, unknown or misused."""


class OutOfDeviceMemory(DeviceError):
    """An allocation exceeded a tier's capacity; the text lists the owners of its memory."""


class StreamFailed(DeviceError):
    """An op raised on a stream. `__cause__` is the original exception."""


class Deadlock(DeviceError):
    """Nothing can run any more; the text says which work waits for what."""


class RaceDetected(DeviceError):
    """Two conflicting accesses without an order; the text names both ops, the bytes and the missing wait.

    `buffer`, `start`, `stop` (bytes), `content` and the two `tasks` let a caller who knows layout and schedule name the
    parameter and the ops' numbers.
    """

    def __init__(
        self, what: str, *, buffer: str, start: int, stop: int, content: object, tasks: tuple[object, object]
    ) -> None:
        super().__init__(what, fix="the one that comes later in the schedule must wait for the other")
        self.buffer, self.start, self.stop, self.content, self.tasks = buffer, start, stop, content, tasks


class BrokenPromise(DeviceError):
    """An op read or wrote memory outside what it declares."""


class RankError(MegaTrainError):
    """Another rank has failed, has ended, or made different calls."""


class DiskError(DeviceError):
    """A folder for scratch files is missing or refused, or a drive failed to read or write."""


class DiskFull(DiskError):
    """A disk has less space left than is needed."""


class CorruptRegion(DiskError):
    """A region on a disk differs from what was written, or was never written completely."""


class NonFinite(MegaTrainError):
    """A loss or a gradient is not finite. The text says which units, if any, were already updated.

    parameters: names of weights that are not finite themselves, with which every further step fails. of_loss: whether
    it is the loss.
    """

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", parameters: Sequence[str] = (), of_loss: bool = False
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.parameters, self.of_loss = tuple(parameters), of_loss


class ExportError(MegaTrainError):
    """A model folder could not be written; no partial files are left."""


class CheckpointError(MegaTrainError):
    """A checkpoint could not be written, read or removed; others are unchanged, and no partial files are left."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete, has changed since it was written, or was written by a newer version."""
