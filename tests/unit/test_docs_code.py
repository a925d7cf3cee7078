"""Code of README and docs: JSON, Python and commands are checked, and run if that takes seconds.

Commands, options, settings, files and tests that a page names must exist.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.config import json_schema, parse
from ds_ckpt.lab.hosts.backends import free_port
from tests import guide
from tests.command_lines import ROOT, UsageError, check_command, parser_of

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "claims.md"),  # test_claims.py
    *sorted(ROOT.glob("[a-z]*/README.md")),
]
LANGUAGES = ("bash", "json", "python", "toml", "text")
"""A fence names one; `text`, or none, is what a command prints, a formula or a list."""
PROGRAMS = r"(?:\w+=\S+ |nice -n 19 |sudo )*(?:ds-ckpt|deepspeed|python3?|pip|pytest|apt|\.?\.?/?"
PROGRAMS += r"(?:scripts|\.ci)/[\w./]+|ruff|mypy|lint-imports) "

_SAME = {"demo": "MODEL", "zero3.json": "FILE CONFIG C", "hosts": "HOSTS HOSTFILE"}
_SAME |= {"runs/x": "FOLDER COPY", "text.txt": "TEXT", ".": "REPOSITORY", "x": "NAME"}
_SAME |= {"8": "P", "2": "H N"}
STAND_INS = {word: put_in for put_in, words in _SAME.items() for word in words.split()}
"""Words for which the reader puts something in."""
OWN = (
    *("zero3.json", "ds.json", "C.json", "train.py", "llama-7b.json", "mine.json", "links.json"),
    *("text.txt", "hosts", "my_signs.py", "config.json", "plan.json", "ds_ckpt.schema.json"),
    *("report.html", "report.md", "report.json", "runs.jsonl", "samples.jsonl", "gpu_check.json"),
    *("a.json", "b.json", "adapter_model.safetensors"),
)
"""Files that a reader has or that a command writes."""

QUICK = r"ds-ckpt (validate (examples|ds_configs)/|schema -o|hosts list|doctor)"
SLOW = (
    r"ds-ckpt (profile demo|plan )|"
    r"deepspeed (--num_gpus 2 )?(--module ds_ckpt\.run )?(examples/|train\.py)"
)


@dataclass(frozen=True)
class Code:
    """A fenced block, a line of one, or a span of a sentence."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks(page: Path) -> Iterator[Code]:
    """Fenced and indented blocks; "" is the language of one that names none."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^( *)```(.*)\n([\s\S]*?)^\1```", text, re.M):
        yield Code(page, text[: found.start()].count("\n") + 1, found[2], found[3])
    outside = re.sub(r"^( *)```[\s\S]*?^\1```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M)
    for found in re.finditer(r"\n\n((?:    \S.*\n)+)", outside):
        yield Code(page, outside[: found.start()].count("\n") + 3, "", found[1])


def _spans(page: Path) -> Iterator[Code]:
    """What stands between backticks in sentences and tables."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^( *)```[\s\S]*?^\1```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M)
    for found in re.finditer(r"`([^`]+)`", text):
        yield Code(page, text[: found.start()].count("\n") + 1, "", " ".join(found[1].split()))


SCRIPTS = [
    *(p for folder in ("benchmarks", "scripts", "examples") for p in (ROOT / folder).glob("*.py")),
    ROOT / "tests" / "faults" / "__main__.py",
]
BLOCKS = [block for page in PAGES for block in _blocks(page)]
SPANS = [span for page in PAGES for span in _spans(page)]


def _lines(block: Code) -> Iterator[Code]:
    """Commands of a shell block, one each."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    for line in text.splitlines():
        for command in re.sub(r"(^|\s)#.*", "", line).split(" && "):
            if command.strip():
                yield Code(block.page, block.line, "bash", " ".join(command.split()))


TYPED = [line for block in BLOCKS if block.language == "bash" for line in _lines(block)]
NAMED = [
    Code(span.page, span.line, "bash", part)
    for span in SPANS
    for part in span.text.split(" && ")
    if re.match(PROGRAMS, part + " ") and part.strip() != "deepspeed"
]


def _once(codes: list[Code]) -> list[Any]:
    """Each text once, by its first place."""
    first = {code.text: code for code in reversed(codes)}
    return [pytest.param(code, id=str(code)) for code in sorted(first.values(), key=str)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it: the repository's files, and the reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", ".git", "build", ".venv", "benchmarks"):
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")  # results are written into it
    (file,) = (b.text for b in BLOCKS if b.language == "json" and b.page.name == "README.md")
    plain = {key: value for key, value in json.loads(file).items() if key != "ds_ckpt"}
    (folder / "ds.json").write_text(json.dumps(plain))
    for name in ("zero3.json", "C.json", "llama-7b.json", "links.json", "mine.json"):
        (folder / name).write_text(file)
    (folder / "text.txt").write_text("a text\n")
    (folder / "hosts").write_text("localhost slots=2\n")
    (folder / "runs").mkdir()
    return folder


@pytest.fixture(autouse=True)
def _there(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (reader / "train.py").exists():
        shutil.copy(ROOT / "examples" / "two_hosts.py", reader / "train.py")
        shutil.copy(ROOT / "examples" / "corpus.py", reader / "corpus.py")
    monkeypatch.chdir(reader)


def _put_in(command: str) -> str:
    """With the reader's words and the shell's expansions."""
    for name, value in STAND_INS.items():
        command = re.sub(rf"(?<![\w./]){name}(?![\w.])", value, command)
    if re.search(r"[*{]", command) and not re.search("[\"']", command):
        done = subprocess.run(["bash", "-c", f"echo {command}"], capture_output=True, text=True)
        return done.stdout.strip()
    return command


# --- blocks


def test_every_block_names_its_language() -> None:
    for block in BLOCKS:
        assert block.language in ("", *LANGUAGES), block
        if block.language in ("", "text"):
            typed = [x for x in block.text.splitlines() if re.match(PROGRAMS, x) and "[" not in x]
            assert not typed, f"{block}: write bash behind the fence: {typed[0]}"


def _file(fragment: str) -> dict[str, Any]:
    """A DeepSpeed file with what a page shows: all of it, or some of its keys."""
    text = fragment.strip()
    found: dict[str, Any] = json.loads(text if text.startswith("{") else "{" + text + "}")
    if "method" in found:
        found = {"compression": found}
    if not {"ds_ckpt", "zero_optimization"} & set(found):
        found = {"ds_ckpt": found}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}} | found


@pytest.mark.parametrize("block", _once([b for b in BLOCKS if b.language == "json"]))
def test_json_is_a_configuration(block: Code) -> None:
    with guide.registered():
        parse(_file(block.text))


@pytest.mark.parametrize("block", _once([b for b in BLOCKS if b.language == "python"]))
def test_python_runs(block: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse(block.text, str(block))
    if block.page == guide.PAGE:
        with guide.registered() as method:
            assert method.name == "sign"
    elif "register_policy" in block.text:
        from ds_ckpt.activation import policies

        known = next(v for v in vars(policies).values() if isinstance(v, dict) and "block" in v)
        monkeypatch.setitem(known, "first_part", None)
        del known["first_part"]
        exec(compile(tree, str(block), "exec", dont_inherit=True), {"__name__": "guide"})
        assert "first_part" in known
        del known["first_part"]
    else:  # those with a model run under the launcher, below
        assert "ds_ckpt.initialize(model=model" in block.text, "no test runs this block"


@pytest.mark.parametrize("block", _once([b for b in BLOCKS if b.language == "toml"]))
def test_an_entry_point_names_what_the_page_defines(block: Code) -> None:
    group, line = block.text.strip().splitlines()
    assert group == '[project.entry-points."ds_ckpt.compressors"]'
    name, _, target = line.partition(" = ")
    with guide.registered() as method:
        assert json.loads(target) == f"my_signs:{method.__name__}"
        assert name == method.name


# --- commands


@pytest.mark.parametrize("code", _once(TYPED))
def test_a_command_can_be_typed(code: Code) -> None:
    check_command(_put_in(code.text))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_sentences_can_be_typed(page: Path) -> None:
    for code in (c for c in NAMED if c.page == page):
        text = code.text.removesuffix(" ...")
        try:
            check_command(_put_in(text), named=True)
        except (AssertionError, KeyError, StopIteration, OSError, UsageError) as error:
            pytest.fail(f"{code}: `{code.text}`: {error!r}")


def test_a_wrong_command_is_found() -> None:
    for wrong in (
        "ds-ckpt profile demo --no-such",
        "deepspeed --num_gpux 2 train.py",
        "deepspeed --num_gpus two examples/train.py",
        "./scripts/gone.sh",
        "pip install -c gone.txt torch",
        "python benchmarks/frontier.py --seeds x",
        "curl x",
    ):
        with pytest.raises((AssertionError, KeyError, UsageError)):
            check_command(wrong)


def _arguments(command: str) -> list[str]:
    import shlex

    words = shlex.split(command, comments=True)
    return words[words.index("ds-ckpt") + 1 :]


@pytest.mark.parametrize("code", _once([c for c in TYPED + NAMED if re.match(QUICK, c.text)]))
def test_quick_commands_run(code: Code) -> None:
    found = CliRunner().invoke(app, _arguments(code.text))
    assert found.exit_code == 0, found.output
    assert found.output or "-o" in code.text


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("code", _once([c for c in TYPED + NAMED if re.match(SLOW, c.text)]))
def test_other_commands_run(code: Code) -> None:
    assert _run(_short(code.text))


@pytest.mark.slow
def test_a_printed_plan_is_what_is_printed() -> None:
    """Word by word: where cells are broken depends on the terminal's width."""
    command, printed = (b.text for b in _blocks(ROOT / "docs" / "plan.md"))
    said = set(_run(command.strip()).split())
    for line in printed.splitlines():
        assert set(line.split()) <= said, line


def _short(command: str) -> str:
    """With a few steps."""
    if "examples/" in command and "--steps" not in command:
        command += " --steps 8"
    if "train.py --deepspeed_config zero3.json" in command:
        command += " --steps 8"
    return re.sub("--steps 100?", "--steps 8", command)


def _run(command: str) -> str:
    """As a reader runs it, in the reader's folder, at a port where nobody else's processes meet."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = re.sub(r"^ds-ckpt", f"{sys.executable} -m ds_ckpt.cli", command)
    command = re.sub(r"^deepspeed", f"deepspeed --master_port={free_port()}", command)
    done = subprocess.run(
        ["bash", "-c", command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_lines_that_work_work(page: str, reader: Path) -> None:
    """The page's Python under the page's file, with a model before it and a step behind."""
    texts = {b.language: b.text for b in _blocks(ROOT / page) if b.language in ("json", "python")}
    (reader / "zero3.json").write_text(texts["json"])
    before = "from corpus import batches, small_llama\nmodel = small_llama()\n"
    after = (
        "ids = next(batches(0, 2, 32)).to(engine.device)\n"
        "loss = engine(input_ids=ids, labels=ids).loss\n"
        "engine.backward(loss)\nengine.step()\n"
        "print('trained at', loss.item(), ds_ckpt.session_of(engine) is not None)\n"
    )
    (reader / "own.py").write_text(before + texts["python"] + after)
    assert re.search(r"trained at \d\.\d+ True", _run("deepspeed --num_gpus 2 own.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_a_script_imports_what_is_there(script: Path) -> None:
    """Also where it does so late: those of benchmarks are seldom run."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_ckpt"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


# --- what sentences name


def test_settings_in_sentences_are_settings() -> None:
    schema = json_schema()
    sections = [section["properties"] for section in schema["$defs"].values()]
    deepspeed = {"ds_ckpt", "zero_optimization", "torch_adam", "text", "label", "share"}
    for span in SPANS:
        found = re.match(r'"(\w+)"\s*:', span.text)
        if found is None:
            continue
        for key in re.findall(r'"(\w+)"\s*:', span.text):
            where = [s[key] for s in sections if key in s]
            assert where or key in deepspeed, f"{span}: no section has {key}"
        value = span.text.partition(":")[2].strip()
        allowed = [
            w["enum"] for s in sections for k, w in s.items() if k == found[1] if "enum" in w
        ]
        if allowed and re.fullmatch(r'"\w+"', value):
            registered = {"first_part", "sign"}
            words = {v for values in allowed for v in values} | registered
            assert json.loads(value) in words, f"{span}: {span.text}"


def test_options_in_sentences_are_options() -> None:
    import typer

    known = {"--slow", "--help", "--launcher", "--num_gpus", "--hostfile", "--module", "--hostname"}

    def add(group: Any) -> None:
        for parameter in group.params:
            known.update(parameter.opts, parameter.secondary_opts)
        for command in getattr(group, "commands", {}).values():
            add(command)

    add(typer.main.get_command(app))
    for script in SCRIPTS:
        known.update(o for a in parser_of(script)._actions for o in a.option_strings)
    for code in [s for s in SPANS if s.text.startswith("--")]:
        assert code.text.split()[0].partition("=")[0].strip(",") in known, f"{code}: {code.text}"
    for code in [b for b in BLOCKS if b.language in ("", "text")]:
        assert set(re.findall(r"(?<=[\s\[(])--[a-z][\w-]*", code.text)) <= known, str(code)


def test_files_and_tests_in_sentences_are_there() -> None:
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    ).stdout.split()
    names = names or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    text = {n: (ROOT / n).read_text() for n in names if re.match(r"tests/.*\.py$", n)}
    tests = set(re.findall(r"def (test_\w+)", "\n".join(text.values())))
    for span in SPANS:
        file, _, test = span.text.removeprefix("./").partition("::")
        is_file = re.fullmatch(r"[\w./]+\.(py|sh|json|jsonl|txt|md|toml|svg|yml|cff)", file)
        if is_file and Path(file).name not in OWN and not file.startswith("runs/"):
            assert any(f"/{n}".endswith(f"/{file}") for n in names), f"{span}: {span.text}"
        for one in {test, span.text} - {""}:
            if re.fullmatch(r"test_\w+", one):
                modules = {Path(n).stem for n in text}
                assert one in tests | modules, f"{span}: {one}"
