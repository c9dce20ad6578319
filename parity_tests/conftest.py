"""Fixtures and strictness shared by the suite, and the table of rungs it ends with."""

import atexit
import functools
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ladder
from lockstep import results
from lockstep.config.kinds import COMPARED
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from parity_tests import kept, tiers

# Before a framework is imported, and for the processes the tests start. The toys are too small to
# share: with one thread each, two workers do not fight for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NPROC", "1")  # the same for XLA
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # one GPU for two frameworks
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LOCKSTEP_AUTOTUNE"] = "none"  # or which way a trainer takes would hang on its speed
# Of a toy's programs none takes JAX's default, a second.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Or freed tensors stay with the process: its threshold rises with the largest array that it freed.
# What is smaller is kept, or a quarter of all page faults are of memory given back and taken anew.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "64000000")

# The suite's time is the compiler's: LLVM's optimizer is half of it, and MLIR's emitters, which
# jax 0.10 can do without, are half of the rest.
QUICKLY_COMPILED = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if metadata.version("jaxlib").startswith("0.10."):
    QUICKLY_COMPILED.append("--xla_cpu_use_fusion_emitters=false")

NO_FLOAT16 = "XLA cannot compile float16 for a CPU without F16C"  # jax_impl/extra/capabilities.py

# The asserts that test files share show their values, as those in a test file do.
pytest.register_assert_rewrite(
    "parity_tests.browser",
    "parity_tests.runs.checkpoints",
    "parity_tests.data.corpora",
    "parity_tests.input.bounds",
    "parity_tests.input.forms",
)

# A suite that was started in the background (&, nohup) ignores Ctrl-C, and so would the processes
# that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lockstep")
    group.addoption("--device", default="cpu", choices=COMPARED, help="where the rungs run")
    group.addoption("--full", action="store_true", help="the whole matrix, not a pairwise covering")
    group.addoption("--quick", action="store_true", help="a minute of tests: make quick")
    group.addoption("--rest", action="store_true", help="what make test leaves to make test-rest")
    group.addoption("--fresh-cache", action="store_true",
                    help="compile all programs anew, and keep none")  # fmt: skip
    group.addoption("--status", metavar="FILE", help="put the verdicts there, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", tiers.MARK)
    if sum(config.getoption(name) for name in ("--quick", "--rest", "--full")) > 1:
        raise pytest.UsageError("--quick, --rest, --full: each is a command of its own; give one")
    if config.getoption("--device") != "cpu" and any(map(config.getoption, ("--quick", "--rest"))):
        raise pytest.UsageError("--quick and --rest choose tests for a CPU; leave them out")
    if config.getoption("--device") == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if not config.getoption("--full"):  # docs/decisions/housekeeping.md
            os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICKLY_COMPILED])
    if not hasattr(config, "workerinput"):  # xdist's workers are given their parent's variables
        _share_programs(fresh=config.getoption("--fresh-cache"))
        config.pluginmanager.register(Outcomes(config))


def _share_programs(*, fresh: bool) -> None:
    """Many tests, the processes that they start, and the next run compile the same program.

    A folder that the user has named for JAX stays theirs, unless all is to be compiled anew.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ and not fresh:
        return
    try:
        folder = None if fresh else kept.open_folder()
    except OSError:  # no home, or no place to write: nothing is kept
        folder = None
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="lockstep-xla-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device only what asks for it runs there: the rest has both frameworks inside.
    What the default suite leaves out runs with --full, or by its name. Tiers are shares of a CPU's
    minutes: on another device all cases run."""
    device = config.getoption("--device")
    if device == "cpu" and not config.getoption("--full"):
        tiers.select(config, items)
    if device != "cpu":
        skip = pytest.mark.skip(reason=f"not run on {device}: a CPU test")
        for item in items:
            if "device" not in getattr(item, "fixturenames", ()):
                item.add_marker(skip)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """To import all test files takes `make quick` a third of its minute."""
    if not (config.getoption("--quick") and collection_path.match("test_*.py")):
        return None
    return not tiers.may_be_quick(collection_path.read_text(encoding="utf-8")) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without looking for garbage: a million imported objects stay, and a look among them
    takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One more than cores for the rest, where tests wait for half a minute and compute nothing."""
    return (os.cpu_count() or 1) + 1 if config.getoption("--rest") else None


@pytest.hookimpl(optionalhook=True)  # the suite runs without xdist, too
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from parity_tests.scheduling import ByPrograms

    return ByPrograms(config, log)


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_end_with_their_tests() -> Iterator[None]:
    """Nor do a twin's switches outlast a module: float64, left on, would fail another one."""
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_default_matmul_precision", None)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


TWINS = tuple(Side(framework, module) for framework, module in GPT.modules.items())


@pytest.fixture(scope="session")
def sides() -> Iterator[tuple[Side, Side]]:
    """Our two twins, each in a process of its own, which starts with the first question."""
    yield TWINS  # type: ignore[misc]
    _end_twins()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ends the twins' processes before a test that does not ask them: a compiler takes a GB."""
    if item.config.getoption("--quick") and (mark := tiers.deciding(item)):
        item.user_properties.append(("shows", mark.kwargs["guard"]))
    if not {"sides", "device"} <= {*getattr(item, "fixturenames", ())}:
        _end_twins()


def _end_twins() -> None:
    for side in TWINS:
        side.forget()
        side.close()


@functools.cache
def _has_f16c() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and " f16c " in info.read_text(encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skips what a twin cannot do on this machine, where the twin says so."""
    report = yield
    said = report.failed and NO_FLOAT16 in report.longreprtext + report.capstderr
    if said and not _has_f16c():
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, NO_FLOAT16)
    return report


# --- the table: outcomes come back from the workers as user properties


class Outcomes:
    """Writes the rungs' outcomes as they come, so that a killed suite leaves what it found."""

    def __init__(self, config: pytest.Config) -> None:
        self.found: list[dict[str, Any]] = []
        self.shown: Counter[str] = Counter()  # by `make quick`, tests of each kind
        self.device, self.file = config.getoption("--device"), config.getoption("--status")
        self.workers = getattr(config.option, "numprocesses", None) or 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        shown = [str(value) for name, value in report.user_properties if name == "shows"]
        if shown and report.when == "call" and not report.skipped:
            self.shown.update(shown)
        new = [
            {**json.loads(str(value)), "seconds": report.duration}
            for name, value in report.user_properties
            if name == "outcome" and report.when == "call"
        ]
        self.found += new
        if new and self.file:
            results.put(Path(self.file), [
                results.row(name, self.device, row.pop("seconds") / self.workers, **row)
                for name, row in ladder.summarise(self.found).items()
            ])  # fmt: skip

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.found:
            terminalreporter.section("rungs")
            terminalreporter.write_line(ladder.status(ladder.summarise(self.found)))
        if self.shown:
            terminalreporter.section("make quick ran")
            for what, count in sorted(self.shown.items()):
                terminalreporter.write_line(f"{count:4} {what}")
