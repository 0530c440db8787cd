"""What every test may count on: fixed seeds, one thread or two, no network, and no GPU test without a GPU.

torch is set up only where a test module has imported it, so that the torch-free rooms stay quick to test.
"""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.quick_cases import mark_all_but_few_slow

try:
    from hypothesis import HealthCheck, Phase, settings
except ModuleNotFoundError:  # `make gpu` asks for torch, transformers, numba and pytest alone
    settings = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from tests.fake_hub import Hub
    from tests.fork_server import Preloaded

# Before any test module imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not take a core from those that work
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads and a fork warn about each other

importlib.metadata.version = cache(importlib.metadata.version)  # each checkpoint and each comparison notes some
gc.disable()  # until all is collected: nothing of it is garbage
atexit.register(gc.unfreeze)  # or triton's bindings list as leaks what was frozen behind that


def _leave_at_once(worker: int) -> None:
    """A worker has reported all by now, and taking its modules apart costs it seconds. Its forks end as they would."""
    if os.getpid() == worker:
        os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(_leave_at_once, os.getpid())  # it is called last

# Whoever starts the tests in the background of a shell script has Ctrl-C ignored, and tests ask what it does.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Timing on a shared machine says nothing about a property, hence no deadline and no complaint about slowness. The first
# counterexample is told as it was drawn: the search for a smaller one takes minutes, and swallows the time limit of a
# test. `make test-all` does search.
if settings is not None:
    settings.register_profile(
        "ci",
        max_examples=7,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
    )
    settings.register_profile("thorough", max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("ci")  # `--hypothesis-profile` overrides it


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders whose tests are all slow, or all for a GPU; without them what they import is not waited for either."""
    here = Path(__file__).parent
    mark = {here / "bench": "slow", here / "gpu": "gpu"}.get(collection_path)
    return True if mark and f"not {mark}" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)  # before the cases that `-m` asks for are picked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_all_but_few_slow(items)
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    _counted[0] = _cpu_seconds()
    gc.enable()
    gc.freeze()  # the libraries stay; each collection that a trainer asks for would go through them again
    gc.set_threshold(100_000, 20, 100)  # of 700 objects, the usual, collections take a twelfth of all CPU time


def _folder_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the session remembers: one folder for all workers, above their own."""
    folder = tmp_path_factory.getbasetemp() / "remembered"
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp().parent / "remembered"
    folder.mkdir(exist_ok=True)
    return folder


DEAREST, SHOWN_FROM = 10, 60.0
"""Tests that are named at the end of a run, of so many seconds of CPU time or more. A clock would blame what ran in a
busy minute."""
_counted = [0.0]


def _cpu_seconds() -> float:
    """Of this process, of those that it has waited for, and of those that `preloaded` has."""
    server = sys.modules.get("tests.fork_server")
    return sum(os.times()[:4]) + (server.Preloaded.spent if server else 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    now = _cpu_seconds()
    report.cpu_seconds, _counted[0] = now - _counted[0], now  # type: ignore[attr-defined]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    spent: Counter[str] = Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if seconds := getattr(report, "cpu_seconds", 0.0):
            spent[report.nodeid] += seconds
    if spent.total() >= SHOWN_FROM:
        terminalreporter.section(f"{spent.total():.0f} seconds of CPU time in tests, of which the dearest")
        for test, seconds in spent.most_common(DEAREST):
            terminalreporter.write_line(f"{seconds:6.1f} {test}")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests find to be right is remembered for the session, and nothing in the user's home is read or written.

    A run's measure of the machine is small (`tests.fork_server.remember_in`).
    """
    from tests.fork_server import remember_in

    remember_in(_folder_of_all(tmp_path_factory))


@pytest.fixture(autouse=True, scope="module")
def _frozen_after_each_file() -> Iterator[None]:
    """What a file leaves behind is gone through once, and not by each collection in files after it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_seeds(request: pytest.FixtureRequest) -> None:
    """Each test starts from the same random state, whichever ran before it."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        seed = torch.manual_seed if request.node.get_closest_marker("gpu") else torch.default_generator.manual_seed
        seed(0)  # for devices that are not there the stack is written down: as much work as a short test


SERVER = pytest.StashKey["Preloaded"]()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """The server is forked while this process has imported everything and run nothing."""
    if not any("preloaded" in getattr(item, "fixturenames", ()) for item in session.items):
        return (yield)
    from tests.fork_server import Preloaded

    session.config.stash[SERVER] = Preloaded()
    try:
        return (yield)
    finally:
        session.config.stash[SERVER].close()


@pytest.fixture(scope="session")
def preloaded(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Preloaded:
    """For calls that want a process of their own."""
    server = pytestconfig.stash[SERVER]
    server.prepare(tmp_path_factory.mktemp("said"), _folder_of_all(tmp_path_factory))
    return server


def forget_hub() -> None:
    """What a new process does not know: answers of the hub."""
    from megatrain.data import read_rows
    from megatrain.system.hub_client import look_up_model

    getattr(read_rows.commit_or_download, "cache_clear", int)()  # not where a test has replaced it
    look_up_model.cache_clear()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub on this machine, which this process takes for the only one, with caches of its own."""
    from tests.fake_hub import Hub, settings_for

    with Hub() as found:
        for module, name, value in settings_for(found.endpoint, tmp_path_factory.mktemp("hub")):
            monkeypatch.setattr(module, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_of_someone")
        forget_hub()
        yield found
        forget_hub()


@pytest.fixture(autouse=True)
def _measured_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model like one before is not measured again, and of the quick suite's none whose size is no question
    (`tests.measurement_cache`)."""
    if profile := sys.modules.get("megatrain.model.profile"):
        from tests import measurement_cache

        measurement_cache.FOLDER = _folder_of_all(tmp_path_factory)
        is_in, is_quick = request.node.nodeid.startswith, "not slow" in request.config.option.markexpr
        anew = is_in(measurement_cache.MEASURED_ANEW)
        measurement_cache.remember(profile, not anew)
        measurement_cache.measure_roughly(profile, is_quick and not anew and is_in(measurement_cache.ROUGHLY))
        split_into_units = sys.modules["megatrain.model.split_into_units"]
        measurement_cache.split_once(split_into_units, not is_in(measurement_cache.SPLIT_ANEW))
        if schedule_cache := sys.modules.get("megatrain.train.schedule_cache"):
            measurement_cache.spare(schedule_cache, is_quick and not anew)
