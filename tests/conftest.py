"""Checks of all tests: no process outlives the session, CI passes on no skips alone, slow waits.

Without `--slow`, tests marked `slow` are skipped, and tests marked `sampled(n)` run n of their
rows; `./scripts/test.sh --slow` runs everything.
"""

import contextlib
import ctypes
import importlib
import os
import sys

import hypothesis
import psutil
import pytest

_PR_SET_CHILD_SUBREAPER = 36

# Triton reads it when it is imported, which any library may do before a test of kernels.
os.environ["TRITON_INTERPRET"] = "1"

# A machine that is busy is no fault of a test: what takes long is for the time limit of pytest.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=250)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    wait = pytest.mark.skip(reason="slow: runs with --slow")
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(wait)
        elif item.get_closest_marker("sampled"):
            tables.setdefault(item.nodeid.split("[")[0], []).append(item)
    for rows in tables.values():
        (count,) = rows[0].get_closest_marker("sampled").args
        # not every n-th one, which may be in step with the values of a parameter
        every = max(1, len(rows) // count)
        kept = {number * len(rows) // count + 7 * number % every for number in range(count)}
        for number, row in enumerate(rows):
            if number not in kept:
                row.add_marker(wait)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") == "true":  # there every package is installed
        pytest.importorskip = lambda name, **_: importlib.import_module(name)
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("thorough" if config.getoption("--slow") else "quick")
    # Processes whose parent has ended become children of this one instead of init's, so that
    # none of them escapes the check at the end.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # what a worker of xdist leaves behind becomes a child of the process above it
    lines = []
    left = _living_children()
    if left:
        lines = ["processes were left behind (now killed):", *left]
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    ran = session.testscollected and not session.config.option.collectonly
    if ran and reporter and os.environ.get("CI") == "true" and not reporter.stats.get("passed"):
        lines.append("no test has passed: with CI=true that is a failure")
        session.exitstatus = session.exitstatus or pytest.ExitCode.NO_TESTS_COLLECTED
    if reporter:
        for line in lines:
            reporter.write_line(line, red=True)


def _living_children() -> list[str]:
    """Return the command lines of processes that still run, and kill them."""
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            # Python's own helper of multiprocessing ends with its parent.
            if process.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in command:
                continue
            left.append(f"  {process.pid}: {command}")
            process.kill()
    return left
