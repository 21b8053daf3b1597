import faulthandler
import gc
import logging
import os
import re
import signal
import statistics
import tempfile
from pathlib import Path

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from tests import interpreter, stress, waiting

# Examples are not timed, nor is how they are drawn: machines that run tests are busy. One limit bounds each test as a whole.
# An ordinary run draws the same examples each time; the larger ones look for others.
settings.register_profile(
    "engram", deadline=None, derandomize=stress.SIZE == "small", suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("engram")

# As an import of torchrl does. Without it tensordict leaves "None" in the environment, which it cannot read in the programs that tests
# start where torchrl is not installed.
os.environ.setdefault("LAZY_LEGACY_OP", "False")

# Kernels of Triton run in its interpreter where there is no GPU. It looks when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

#: Folders whose tests restore onto other ranks, which may leave rows out. tests/reshard/test_reports.py asks for what is said then.
LEAVING_OUT = ("checkpoint", "cli", "cluster", "features", "ranks", "reshard")
LEFT_OUT = pytest.mark.filterwarnings("ignore:restore. .* were left out. [0-9]+ of:UserWarning")


#: Words of test modules that start processes or threads, train agents, compile or draw millions of rows: `make quick` leaves them out.
SLOW = re.compile(
    r"\b(subprocess|multiprocessing|fork\w*|Popen|spawn\w*|processes|interpreter|fresh|hypothesis|stress|checkpoint\w*|served?|"
    r"demo|fleet|Thread|threading|compile|million|timing|trainer\w*)\b"
)


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="a case of each test, of modules that start no processes")
    parser.addoption("--all-cases", action="store_true", help="all cases of each test, not a sample of them")
    parser.addoption(
        "--record-seconds", action="store_true", help="write to tests/seconds.json what a case of each test took"
    )
    parser.addoption(
        "--torn-rows", type=int, help="rows that the tests of torn rows read on a device: default 10^8 on a GPU"
    )


def pytest_configure(config):
    """Ctrl-C reaches tests that send it, also where pytest runs in the background of a shell, which lets it ignore or block that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    if config.getoption("numprocesses", None) and not config.option.collectonly:
        interpreter.share()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))
        if config.option.record_seconds:
            config.pluginmanager.register(_Seconds())


class _Failures:
    """Says which test failed as soon as it has. With several workers pytest keeps the names to its end, which a run may not reach."""

    def __init__(self, config):
        self._config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"failed in {report.when}: {report.nodeid}", red=True)


class _Seconds:
    """Notes what a case of each test took."""

    def __init__(self):
        self._took = {}

    def pytest_runtest_logreport(self, report):
        cases = self._took.setdefault(test_of(report.nodeid), {})
        cases[report.nodeid] = cases.get(report.nodeid, 0) + report.duration

    def pytest_sessionfinish(self):
        stress.record({test: statistics.median(cases.values()) for test, cases in self._took.items()})


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """pytest-timeout's limit, in seconds of a core: a busy machine does not reach it."""
    limit = waiting.Limit(settings.timeout)

    def look(*_):
        left_s = limit.left_s()
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 0.1))
            return
        if pytest_timeout.is_debugging() and not settings.disable_debugger_detection:
            return
        faulthandler.dump_traceback(all_threads=True)
        limit.check(item.nodeid)

    def cancel():
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


def pytest_collection_finish():
    """Modules and thousands of tests are there to stay: the collector need not look at them each time, nor in each forked child."""
    import torch  # the process that hands out tests to workers needs none

    from engram._support import native

    torch.set_num_threads(1)  # there is a worker per core: threads would only wait for each other
    native._core.set_wait_limit(60.0)  # for processes that a busy machine lets wait while they hold something
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """The same draws in every run. Samplers without a generator take their numbers from torch's default one."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logged():
    """What programs log shows again in the next test: examples and benchmarks quieten them."""
    logger = logging.getLogger("engram")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def ram(tmp_path):
    """A folder in RAM, where there is some: what is saved there waits for no disk."""
    if stress.RAM is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=stress.RAM, prefix="engram-tests-") as folder:
        yield Path(folder)


def pytest_collection_modifyitems(config, items):
    """Tests of some folders ignore that a restore left rows out.

    An ordinary run takes a sample of the cases of each test: as many as its mark ``stress(sample=n)`` says, else as many as its time
    allows. ``--all-cases`` takes all, as do ``-m stress`` and larger sizes. Tests that are asked for by name are taken as they are."""
    for item in items:
        if item.path.parent.name in LEAVING_OUT:
            item.add_marker(LEFT_OUT)
    if config.option.quick:
        deselect(config, items, {id(item) for item in items} - {id(item) for item in quick(items)})
        return
    chosen = any("::" in argument for argument in config.args) or "stress" in config.option.markexpr
    if chosen or config.option.all_cases or stress.SIZE != "small":
        return
    left_out = set()
    for test, cases in by_test(items).items():
        left_out.update(
            id(item) for item in stress.others(cases, stress_of(cases[0]).get("sample", stress.cases(test)))
        )
    deselect(config, items, left_out)


def stress_of(item):
    """What the test's ``stress`` marker says; empty without one."""
    marker = item.get_closest_marker("stress")
    return {} if marker is None else marker.kwargs


def test_of(nodeid):
    """The name of the test that it is a case of."""
    return nodeid.partition("[")[0]


def by_test(items):
    """The cases of each test, by its name."""
    tests = {}
    for item in items:
        tests.setdefault(test_of(item.nodeid), []).append(item)
    return tests


def quick(items):
    """The middle case of each test of the modules that start no processes."""
    slow = {path: bool(SLOW.search(path.read_text())) for path in {item.path for item in items}}
    return [cases[len(cases) // 2] for cases in by_test(item for item in items if not slow[item.path]).values()]


def deselect(config, items, left_out):
    """Take the items with these ids out of the run."""
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = [item for item in items if id(item) not in left_out]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
