"""Plugin that puts `dense` into engines of stage 3 (`benchmarks/deepspeeds_tests.py`).

As a pytest plugin (`-p tests.injected`) it writes a line of JSON for each test. If `INJECT` names a
file, `deepspeed.initialize` is the plugin's before a test is imported, and the file gets a line for
each engine that has a session. Processes fork from a server that has imported this module.
"""

import functools
import inspect
import json
import multiprocessing
import os
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder

INJECT, RESULTS = "DS_CKPT_INJECTED", "DS_CKPT_RESULTS"
SECTION = {"compression": {"method": "dense"}}


def _with_section(config: Any) -> Any:
    """Return the configuration, with our section if it selects stage 3."""
    if isinstance(config, str) and Path(config).is_file():
        read = json.loads(Path(config).read_text())
        changed = _with_section(read)
        return config if changed is read else changed
    if not isinstance(config, Mapping):
        return config
    if config.get("zero_optimization", {}).get("stage") != 3:
        return config
    return {**config, "ds_ckpt": SECTION}


def _inject(attached: Path) -> None:
    import ds_ckpt

    original = inspect.signature(deepspeed.initialize)
    ds_ckpt.install()
    ours = deepspeed.initialize

    @functools.wraps(ours)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = original.bind(*args, **kwargs)
        for name in ("config", "config_params"):
            if name in given.arguments:
                given.arguments[name] = _with_section(given.arguments[name])
        path = getattr(given.arguments.get("args"), "deepspeed_config", None)
        if path is not None and (changed := _with_section(path)) is not path:
            given.arguments["args"].deepspeed_config = None
            given.arguments["config"] = changed
        result = ours(*given.args, **given.kwargs)
        if ds_ckpt.session_of(result[0]) is not None:
            with attached.open("a") as file:
                file.write("engine\n")
        return result

    deepspeed.initialize = initialize


_Engine: Any = deepspeed.runtime.engine.DeepSpeedEngine
if not hasattr(_Engine, "sparse_tensor_module_names"):  # tests of before 0.19.8 compare them
    _Engine.sparse_tensor_module_names = frozenset()
for _operator in (CPUAdamBuilder, FusedAdamBuilder):
    _operator().load(verbose=False)
if INJECT in os.environ:
    _inject(Path(os.environ[INJECT]))


def pytest_configure() -> None:
    slow = "deepspeed.runtime.zero.muon.muon_optimizer"  # every first engine imports the compiler
    multiprocessing.set_forkserver_preload([__name__, slow])


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """DeepSpeed's fixtures that are classes, which pytest no longer sees since 8.4."""
    fixture = inspect.isclass(obj) and getattr(obj, "is_dist_fixture", False)
    if fixture and not inspect.isabstract(obj):
        fixtures = collector.session._fixturemanager
        fixtures._register_fixture(name=name, func=obj, nodeid=collector.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are made for several stages run for stage 3."""
    stages = [getattr(item, "callspec", None) for item in items]
    kept = [
        item
        for item, spec in zip(items, stages, strict=True)
        if spec is None or spec.params.get("zero_stage", 3) == 3
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _engines() -> int:
    path = Path(os.environ.get(INJECT, os.devnull))
    return len(path.read_text().splitlines()) if path.is_file() else 0


def _write(**line: Any) -> None:
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(line) + "\n")


_REPORTS = pytest.StashKey[list[pytest.TestReport]]()
_WORST = ("failed", "skipped", "passed")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Write a line before and after the test; the first is the last one if it never ends."""
    _write(test=item.nodeid, outcome="never ended")
    reports = item.stash[_REPORTS] = []
    before, start = _engines(), time.monotonic()
    try:
        return (yield)
    finally:
        for worst in sorted(reports, key=lambda report: _WORST.index(report.outcome))[:1]:
            _write(
                test=item.nodeid,
                outcome=worst.outcome,
                said="" if worst.passed else str(worst.longrepr)[-500:],
                engines=_engines() - before,
                seconds=time.monotonic() - start,
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
    report = yield
    item.stash[_REPORTS].append(report)
    return report
