"""Code of README and docs: JSON, Python and commands are checked, and run if that takes seconds."""

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from ds_ckpt.activation.policies import POLICIES
from ds_ckpt.cli import app
from ds_ckpt.config import parse
from ds_ckpt.lab.hosts.backends import free_port
from tests import guide
from tests.command_lines import ROOT, UsageError, check_command

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "claims.md"),  # test_docs.py
    *sorted(ROOT.glob("[a-z]*/README.md")),
]
PROGRAMS = r"(?:\w+=\S+ |nice -n 19 )*(?:ds-ckpt|deepspeed|python3?|pip|pytest|apt|\.?\.?/?"
PROGRAMS += r"(?:scripts|\.ci)/[\w./]+|ruff|mypy|lint-imports) "

_SAME = {"demo": "MODEL", "zero3.json": "FILE CONFIG C", "hosts": "HOSTS HOSTFILE"}
_SAME |= {"runs/x": "FOLDER COPY", "text.txt": "TEXT", ".": "REPOSITORY", "x": "NAME"}
_SAME |= {"8": "P", "2": "H N"}
PLACEHOLDERS = {word: value for value, words in _SAME.items() for word in words.split()}
OWN = (
    *("zero3.json", "ds.json", "C.json", "train.py", "llama-7b.json", "mine.json", "links.json"),
    *("text.txt", "hosts", "my_signs.py", "config.json", "plan.json", "ds_ckpt.schema.json"),
    *("report.html", "report.md", "report.json", "runs.jsonl", "samples.jsonl", "gpu_check.json"),
    *("a.json", "b.json", "adapter_model.safetensors"),
)
"""Files that a reader has or that a command writes."""

QUICK = r"ds-ckpt (validate (examples|ds_configs)/|schema -o|hosts list|doctor)"
_FENCE = re.compile(r"^( *)```(.*)\n([\s\S]*?)^\1```", re.M)


class Code(NamedTuple):
    """A fenced block, a line of one, or a span of a sentence."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks(page: Path) -> Iterator[Code]:
    """Fenced blocks; "" is the language of one that names none."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Code(page, text[: found.start()].count("\n") + 1, found[2], found[3])


def _spans(page: Path) -> Iterator[Code]:
    """Texts between backticks in sentences and tables."""
    text = _FENCE.sub(lambda m: "\n" * m[0].count("\n"), page.read_text(encoding="utf-8"))
    for found in re.finditer(r"`([^`]+)`", text):
        yield Code(page, text[: found.start()].count("\n") + 1, "", " ".join(found[1].split()))


def _commands(block: Code) -> Iterator[Code]:
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        for command in re.sub(r"(^|\s)#.*", "", line).split(" && "):
            if command.strip():
                yield Code(block.page, block.line, "bash", " ".join(command.split()))


SCRIPTS = [p for name in ("benchmarks", "scripts", "examples") for p in (ROOT / name).glob("*.py")]
BLOCKS = [block for page in PAGES for block in _blocks(page)]
SPANS = [span for page in PAGES for span in _spans(page)]
TYPED = [line for block in BLOCKS if block.language == "bash" for line in _commands(block)]
NAMED = [
    Code(span.page, span.line, "bash", part)
    for span in SPANS
    for part in span.text.split(" && ")
    if re.match(PROGRAMS, part + " ") and part.strip() not in ("deepspeed", "python")
]


def _once(codes: list[Code]) -> list[Any]:
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
    shutil.copy(ROOT / "examples" / "two_hosts.py", folder / "train.py")
    shutil.copy(ROOT / "examples" / "corpus.py", folder / "corpus.py")
    return folder


@pytest.fixture(autouse=True)
def _there(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)


def _filled_in(command: str) -> str:
    """Return the command with placeholders and shell expansions filled in."""
    for name, value in PLACEHOLDERS.items():
        command = re.sub(rf"(?<![\w./]){name}(?![\w.])", value, command)
    if re.search(r"[*{]", command) and not re.search("[\"']", command):
        return subprocess.check_output(["bash", "-c", f"echo {command}"], text=True).strip()
    return command


def test_every_block_names_its_language() -> None:
    for block in BLOCKS:
        assert block.language in ("", "bash", "diff", "json", "python", "toml", "text"), block
        if block.language in ("", "text"):
            typed = [x for x in block.text.splitlines() if re.match(PROGRAMS, x) and "[" not in x]
            assert not typed, f"{block}: write bash behind the fence: {typed[0]}"


@pytest.mark.parametrize("block", _once([b for b in BLOCKS if b.language == "json"]))
def test_json_is_a_configuration(block: Code) -> None:
    """All of a DeepSpeed file, or some of its keys."""
    text = block.text.strip()
    found: dict[str, Any] = json.loads(text if text.startswith("{") else "{" + text + "}")
    if "method" in found:
        found = {"compression": found}
    if not {"ds_ckpt", "zero_optimization"} & set(found):
        found = {"ds_ckpt": found}
    with guide.registered():
        parse({"zero_optimization": {"stage": 3}} | found)


@pytest.mark.parametrize("block", _once([b for b in BLOCKS if b.language == "python"]))
def test_python_runs(block: Code) -> None:
    if block.page == guide.PAGE:
        with guide.registered() as method:
            assert method.name == "sign"
    elif "register_policy" in block.text:
        exec(compile(block.text, str(block), "exec", dont_inherit=True), {"__name__": "guide"})
        assert POLICIES.pop("first_part")
    elif "step_field" in block.text:
        assert "exec(" in (ROOT / "tests/unit/test_timings.py").read_text(), "it runs this block"
    else:  # those with a model run under the launcher, below
        assert "ds_ckpt.initialize(model=model" in block.text, "no test runs this block"


@pytest.mark.parametrize("code", _once(TYPED))
def test_a_command_can_be_typed(code: Code) -> None:
    check_command(_filled_in(code.text))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_sentences_can_be_typed(page: Path) -> None:
    for code in (c for c in NAMED if c.page == page):
        try:
            check_command(_filled_in(code.text.removesuffix(" ...")), named=True)
        except (AssertionError, KeyError, StopIteration, OSError, UsageError) as error:
            pytest.fail(f"{code}: `{code.text}`: {error!r}")


def test_a_wrong_command_is_found() -> None:
    for wrong in (
        "ds-ckpt profile demo --no-such",
        "deepspeed --num_gpus two examples/train.py",
        "python benchmarks/frontier.py --no-such x",
        "pytest tests/unit/test_autograd_ways.py -k no_such_test",
    ):
        with pytest.raises((AssertionError, UsageError)):
            check_command(wrong)


@pytest.mark.parametrize("code", _once([c for c in TYPED + NAMED if re.match(QUICK, c.text)]))
def test_quick_commands_run(code: Code) -> None:
    found = CliRunner().invoke(app, shlex.split(code.text, comments=True)[1:])
    assert found.exit_code == 0, found.output


def _run(command: str) -> str:
    """Run in the reader's folder, at a free port."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = re.sub(r"^ds-ckpt", f"{sys.executable} -m ds_ckpt.cli", command)
    command = re.sub(r"^deepspeed", f"deepspeed --master_port={free_port()}", command)
    shell = ["bash", "-c", f"{command} 2>&1"]
    done = subprocess.run(shell, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_lines_that_work_work(page: str, reader: Path) -> None:
    """The page's Python under the page's file, with a model before it and a step behind."""
    blocks = [b for b in _blocks(ROOT / page) if b.language in ("json", "python", "diff")]
    texts = {block.language: block.text for block in reversed(blocks)}  # the first of each
    if "diff" in texts:
        texts["python"] = "\n".join(re.findall(r"^\+(.*)", texts["diff"], re.M)) + "\n"
    (reader / "zero3.json").write_text(texts["json"])
    before = "from corpus import batches, small_llama\nmodel = small_llama()\n"
    after = (
        "ids = next(batches(0, 2, 32)).to(engine.device)\n"
        "loss = engine(input_ids=ids, labels=ids).loss\n"
        "engine.backward(loss)\nengine.step()\n"
        "is_attached = ds_ckpt.session_of(engine) is not None\n"
        "print(f'trained at {loss.item()} {is_attached}\\n', end='')\n"  # one write a rank
    )
    (reader / "own.py").write_text(before + texts["python"] + after)
    assert re.search(r"trained at \d\.\d+ True", _run("deepspeed --num_gpus 2 own.py"))


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 900
    assert len(text.partition("```")[0].split()) <= 150, "words before the first code"
    for_me = text.partition("## Is it for me?")[2].partition("\n\n")[0]
    assert for_me.count("\n|") == 2 + 5, "a heading, a line, five rows"
    (least,) = re.findall(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert f"Python {least}+" in text
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", "", _FENCE.sub("", text))
    figures = re.findall(r"(?<![\w.-])\d[\d.,]*(?: (?:GiB|MB|s|bits?)\b|%|x)?", prose)
    assert len(figures) <= 30, figures
    results = (ROOT / "benchmarks/results/weight_bytes.txt").read_text()
    for figure in re.findall(r"\b([\d.]+) MB a node and step become ([\d.]+)", text)[0]:
        assert figure in {f"{float(n):.3g}" for n in re.findall(r"\| ([\d.]+) \|", results)}


@pytest.mark.slow
def test_the_readmes_table_is_what_its_command_prints() -> None:
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^(ds-ckpt profile llama-7b .*\\\n.*)$", text, re.M)
    row = r"^ (none|selective|configured) +4096 x (\d) .* ([\d.]+) GiB +(yes|no|best) "
    rows = re.findall(row, _run(command.replace("\\\n", "")), re.M)
    printed = {(policy, size): (peak, fits) for policy, size, peak, fits in rows}
    table = re.findall(r"^\| (?:Deep|with).*\|(.*GiB.*)\|(.*GiB.*)\|$", text, re.M)
    for policy, cells in zip(("none", "selective", "configured"), table, strict=True):
        for size, cell in zip("14", cells, strict=True):
            peak, fits = printed[policy, size]
            found = re.findall(r"([\d.]+) GiB: (fits|no)", cell)
            assert found == [(peak, "no" if fits == "no" else "fits")], (policy, size)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_a_script_imports_what_is_there(script: Path) -> None:
    """Also late imports: benchmarks are seldom run."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_ckpt"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def test_files_and_tests_in_sentences_are_there() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout.split()
    names = listed or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.*")]
    modules = [ROOT / name for name in names if re.match(r"tests/.*\.py$", name)]
    source = "\n".join(path.read_text() for path in modules if path.exists())
    tests = {*re.findall(r"def (test_\w+)", source), *(path.stem for path in modules)}
    design = (ROOT / "docs/design.md").read_text()
    for room in {name.split("/")[1] for name in names if re.match(r"ds_ckpt/\w+(\.py|/)", name)}:
        assert re.search(rf"^{room}/? ", design, re.M) or room == "__init__.py", room
    for span in SPANS:
        file, _, test = span.text.removeprefix("./").partition("::")
        is_file = re.fullmatch(r"[\w./]+\.(py|sh|json|jsonl|txt|md|toml|svg|yml|cff)", file)
        if is_file and Path(file).name not in OWN and not file.startswith("runs/"):
            assert any(f"/{n}".endswith(f"/{file}") for n in names), f"{span}: {span.text}"
        for one in {test, span.text} - {""}:
            if re.fullmatch(r"test_\w+", one):
                assert one in tests, f"{span}: {one}"


def test_paragraphs_and_sentences_of_docstrings_are_short() -> None:
    """Indented lines are tables, formulas or fields. Colons and semicolons end no sentence."""
    for page in PAGES:
        text = re.sub(r"^#.*", "\n", _FENCE.sub("\n\n", page.read_text("utf-8")), flags=re.M)
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )", text):
            size = 0 if part.lstrip().startswith("|") else len(" ".join(part.split()))
            assert max(size / 120, part.strip().count("\n") + 1) <= 5, (page, part)
    end = re.compile(r"(?<=[.!?])(?<!\.\.\.)(?<!et al\.)\s+|\n\s*\n|\n(?=- )")
    for path in (ROOT / "ds_ckpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                prose = re.sub("^ .*", "\n", inspect.cleandoc(str(node.value.value)), flags=re.M)
                for sentence in end.split(prose):
                    assert len(re.findall(r"\S*\w\S*", sentence)) <= 20, (path, sentence)
