"""Ways in: imports and their cost, `python -m ds_ckpt.run`, engines that are refused."""

import ast
import inspect
import pickle
import re
import subprocess
import symtable
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch

import ds_ckpt
from ds_ckpt import Session, activation, compression, run, uninstall
from ds_ckpt.activation import make_policy
from ds_ckpt.engine import resident_weights
from ds_ckpt.engine.entry import _with_section
from ds_ckpt.engine.guard import Guard
from ds_ckpt.engine.session import ATTRIBUTE, refuse_unsupported
from ds_ckpt.errors import Problem, StateError, UnsupportedError
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.telemetry.units import size
from ds_ckpt.weights.changes import NodeLayout

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ds_ckpt"
PUBLIC = ["ConfigError", "ContractError", "DsCkptError", "Problem", "Session", "StateError"]
PUBLIC += ["UnsupportedError", "attach", "initialize", "install", "session_of", "uninstall"]
"""Frozen: a name that is added, renamed or removed changes what users may rely on."""
USE_ALL = "import ds_ckpt; [getattr(ds_ckpt, n) for n in ds_ckpt.__all__]"
FILES = [str(path.relative_to(ROOT)) for path in ROOT.glob("[de][sx]*s/*.json")]
VALIDATE = f"""from ds_ckpt.cli import app; from ds_ckpt.zero3.settings import refusals
assert not app(["validate", *{FILES}], standalone_mode=False)
for name in "Adam SGD Adagrad RAdam Lion Lamb".split():
    assert not [*refusals({{"train_batch_size": 1, "optimizer": {{"type": name}}}}, 1)]
"""
HELP = "from ds_ckpt.cli import EXAMPLES, app; "
HELP += "[app([*n.split(), '--help'], standalone_mode=False) for n in ('', *EXAMPLES)]"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (HELP, "torch deepspeed transformers accelerate numpy scipy matplotlib"),
        ("import ds_ckpt; dir(ds_ckpt)", "torch deepspeed transformers accelerate peft pydantic"),
        (f"{USE_ALL}; import torch; assert not torch.cuda.is_initialized()", "transformers"),
        ("import ds_ckpt.config", "deepspeed transformers typer"),
        ("import ds_ckpt.compression", "deepspeed"),
        (VALIDATE, "transformers torch._dynamo torch._inductor triton sympy scipy"),
    ],
)
@pytest.mark.sampled(2)
def test_imports_are_light(code: str, heavy: str) -> None:
    check = f"sys.exit(' '.join({{*{heavy.split()}}} & {{*sys.modules}}) or None)"
    command = [sys.executable, "-c", f"import sys; {code}\n{check}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_former_names_warn() -> None:
    session, into = Session.__new__(Session), torch.ones(3)
    step = SimpleNamespace(is_disabled=True)
    guard = Guard(step, ResidualStats(1.0, 1.0), acts=True, logs=False)
    session.exchange = SimpleNamespace(assignment="all", guard=guard, feedback=None)
    for of, name, value, words in (
        (compression, "Gone", compression.Removed, "use Removed"),
        (compression, "RowCodec", compression.Codec, "use Codec"),
        (activation, "make_plan", activation.make_units, "use make_units"),
        (session, "plan", "all", r"use session\.exchange"),
        (session, "residual_bytes", 0, r"use session\.exchange\.feedback\.nbytes"),
        (session, "guard", guard, r"use session\.exchange\.guard"),
        (session, "land", session.drain, r"use session\.drain"),
        (guard, "fallen_back", True, r"use guard\.step\.is_disabled"),
    ):
        with pytest.warns(DeprecationWarning, match=words):
            assert getattr(of, name) == value
    with pytest.warns(DeprecationWarning, match=r"use Tensor\.add_"):
        compression.add_scaled(into, torch.ones(3), 2.0)
    with pytest.warns(DeprecationWarning, match="use make_policy"):
        assert activation.PolicySettings("every_n", every_n=3) == make_policy("every_n", every_n=3)
    assert into.tolist() == [3.0] * 3
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        _ = compression.gone


def test_the_public_names_are_these() -> None:
    assert ds_ckpt.__all__ == PUBLIC
    assert set(dir(ds_ckpt)) == {*PUBLIC, "__version__"}
    for name in PUBLIC:
        value = getattr(ds_ckpt, name)
        assert value.__name__ == name
        assert inspect.getdoc(value), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = ds_ckpt.initialise


def test_imports_point_down_the_rooms() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([str(tool)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    uninstall()


def test_the_launcher_argument_goes_on_to_the_script(tmp_path, capsys) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:], __name__)\nimport beside\n")
    (tmp_path / "beside.py").write_text("")
    original = deepspeed.initialize
    run.main(["--local_rank=1", str(script), "--deepspeed_config", "c.json"])
    assert deepspeed.initialize is not original
    expected = "['--local_rank=1', '--deepspeed_config', 'c.json'] __main__"
    assert expected in capsys.readouterr().out


def test_a_module_of_a_package_runs(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "pkg" / "train.py"
    path.parent.mkdir()
    path.write_text("import sys\nprint(sys.argv, __name__, __package__)\n")
    monkeypatch.chdir(tmp_path)
    run.main(["--local_rank=1", "-m", "pkg.train", "-m", "x"])
    assert f"{[str(path), '--local_rank=1', '-m', 'x']} __main__ pkg" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--local_rank=0"], ["nowhere.py"]])
def test_a_missing_script_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage: deepspeed"):
        run.main(argv)


def test_a_wrong_configuration_ends_with_the_message(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from ds_ckpt.config import parse\nparse({'ds_ckpt': {'activaton': {}}})\n")
    with pytest.raises(SystemExit, match=r"\$.ds_ckpt.activaton"):
        run.main([str(script)])


PIPELINE = type("PipelineEngine", (), {})  # DeepSpeed's own needs several processes


@pytest.mark.parametrize("kind", [PIPELINE, type("OfAUser", (PIPELINE,), {})])
def test_pipelines_are_refused(kind: type) -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert PipelineEngine.__name__ == PIPELINE.__name__
    with pytest.raises(UnsupportedError, match="activation_checkpoint_interval"):
        refuse_unsupported(kind())
    refuse_unsupported(SimpleNamespace(zero_optimization_stage=lambda: 2))


class Parameter(SimpleNamespace):
    def element_size(self) -> int:
        return 2


def test_a_copy_of_the_weights_that_does_not_fit_is_refused(monkeypatch) -> None:
    """4 nodes of 2 ranks: 4 shards of 8, of 2 bytes, on memory that a node's ranks share."""
    gone = Parameter(ds_numel=1_000_001, ds_secondary_tensor=None)
    made = Parameter(ds_numel=10**9, ds_secondary_tensor=torch.empty(1))
    engine = SimpleNamespace(device="cpu", module=SimpleNamespace(parameters=lambda: [gone, made]))
    needed, layout = 16 * 125_001, NodeLayout(4, 2, 0, None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(resident_weights, "free_on", lambda device: needed)
    resident_weights.refuse_too_large(engine, layout, '"auto"')
    monkeypatch.setattr(resident_weights, "free_on", lambda device: needed - 300 * 1024)
    with pytest.raises(UnsupportedError, match=f"takes {size(needed)}.*300 KiB more") as caught:
        resident_weights.refuse_too_large(engine, layout, '"auto"')
    assert caught.value.problems[0].where == "$.ds_ckpt.weights.resident"


def test_a_configuration_in_base64_is_deepspeeds_business() -> None:
    assert _with_section({"config": "eyJ6ZXJv" * 100}) is None  # longer than a file's name may be


@pytest.mark.parametrize("kind", [UnsupportedError, StateError])
@pytest.mark.parametrize("headline", [None, "nothing fits"])
def test_an_error_can_be_raised_in_another_process(kind, headline) -> None:
    error = kind([Problem("a", "b", "c", "d"), Problem("e", "f", "g", "h")], headline=headline)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.problems == error.problems


SHARED = {"TILE", "log", "main", "select_in_blocks"}
"""Of the tiles of two kernels, the logger, ways in, and the kernel of Top-K."""


def test_one_name_for_one_thing() -> None:
    """Only a command's file in cli/ and a kernel share the name of what they call and implement."""
    files = [f for f in PACKAGE.rglob("*.py") if f.name != "__init__.py"]
    trees = (ast.parse(f.read_text(encoding="utf-8")) for f in files)
    files = [f for f in files if f.parent.name not in ("cli", "startup")]
    texts = {f: f.read_text(encoding="utf-8") for f in files if not f.stem.endswith("_kernels")}
    classes = [n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    tables = [symtable.symtable(text, f.name, "exec").get_symbols() for f, text in texts.items()]
    bound = [s.get_name() for t in tables for s in t if s.is_assigned() and not s.is_imported()]
    public = [name for name in bound if not name.startswith("_") and name not in SHARED]
    for names in ([f.stem for f in texts], classes, public):
        assert [name for name, count in Counter(names).items() if count > 1] == []


INTERNAL = r"ds_(?!ckpt)\w+|_config|_param_dict|fp16_\w+|fp32_part\w+|\w*dp_process_group"
INTERNAL += r"|parameter_offload|reduce_bucket_size|reduce_and_\w+|get_param_comm_\w+|model_par\w+"


def test_internals_of_deepspeed_are_read_in_zero3_only() -> None:
    for file in {*PACKAGE.rglob("*.py")} - {*PACKAGE.glob("zero3/*"), PACKAGE / "sharded.py"}:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", "")
            if getattr(getattr(node, "func", None), "id", "") in ("getattr", "hasattr"):
                name = str(getattr(node.args[1], "value", ""))
            assert not re.fullmatch(INTERNAL, name), f"{file.name}: {ast.unparse(node)}"


SET_TWICE = {"step": "of an engine whose session has ended: it refuses to train from then on"}


def words(value: ast.AST, scopes: tuple[ast.AST, ...], seen: frozenset[str]) -> set[str]:
    """Return the strings in an expression, and those that its names are bound to in the scopes."""
    found = set[str]()
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if not node.value.endswith("__") else set()  # a class's prefix
        elif isinstance(node, ast.Name) and node.id not in seen:
            for binding in (b for scope in scopes for b in ast.walk(scope)):
                if isinstance(binding, ast.Assign | ast.AnnAssign | ast.For):
                    to = binding.targets if isinstance(binding, ast.Assign) else [binding.target]
                    if node.id in {n.id for t in to for n in ast.walk(t) if hasattr(n, "id")}:
                        source = binding.iter if isinstance(binding, ast.For) else binding.value
                        found |= words(source, scopes, seen | {node.id}) if source else set()
    return found


def test_each_internal_of_deepspeed_is_patched_in_one_place() -> None:
    places: dict[str, set[str]] = {}
    for file in (*PACKAGE.glob("zero3/*.py"), *PACKAGE.glob("engine/*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        constants = ast.Module(
            [n for n in module.body if isinstance(n, ast.Assign | ast.AnnAssign)]
        )
        defined = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)]
        for function, node in ((f, n) for f in defined for n in ast.walk(f)):
            if isinstance(node, ast.Assign):  # of a module's attribute, and its restoration
                targets = [t for t in node.targets if isinstance(t, ast.Attribute)]
                named = {t.attr: function.name for t in targets if ast.unparse(t.value) == "stage3"}
            elif isinstance(node, ast.Call) and len(node.args) > 2:
                is_patch = ast.unparse(node.func).endswith((".set", ".set_method"))
                attributes = words(node.args[1], (function, constants), frozenset())
                assert attributes or not is_patch, ast.unparse(node)
                named = dict.fromkeys(attributes if is_patch else (), str(node.lineno))
            else:
                continue
            for name, place in named.items():
                places.setdefault(name, set()).add(f"{file.parent.name}/{file.name}: {place}")
    assert {"_post_step", "avg_scatter_grads", "forward", ATTRIBUTE} <= places.keys()
    outside = {name for name, found in places.items() if "engine/" in "".join(found)}
    assert outside == {ATTRIBUTE}
    assert {name for name, found in places.items() if len(found) > 1} == set(SET_TWICE), places
