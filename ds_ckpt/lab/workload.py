"""The built-in workload: a Llama from scratch, and the text of every Python installation as bytes.

The text is the language reference of `help()` and the docstrings of the standard library. A topic
is one entry of the reference or one module; no docstring occurs twice. Nothing is downloaded.
"""

import ast
import hashlib
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ds_ckpt.errors import ConfigError, Problem, UnsupportedError

VOCAB_SIZE = 256
"""Bytes are the tokens."""
STOCK, DENSE = "stock", "dense"
"""Gradients that are reduced by DeepSpeed, and exchanged uncompressed by this plugin."""
RESIDENT = {"whole": "none", "lossless": "lossless"}
"""Placements of resident weights, with their `deltas`."""
BUCKETS = 8
"""Approximate number of buckets per backward; DeepSpeed's default size would give one."""

HELDOUT_SHARE = 0.1
_MIN_PIECES = 20
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts, one to train on and one held out."""

    source: str
    train: bytes
    heldout: bytes

    @property
    def sha256(self) -> str:
        """Return a digest of both parts: equal digests mean equal data."""
        digest = hashlib.sha256(len(self.train).to_bytes(8, "little"))
        digest.update(self.train + self.heldout)
        return digest.hexdigest()


@cache
def embedded_corpus() -> Corpus:
    """Return the corpus of the running Python, a tenth of it held out."""
    return split_topics(python_topics(), source="pydoc_data.topics and stdlib docstrings")


def file_corpus(path: Path, option: str) -> Corpus:
    """Read a text file; topics are its paragraphs, joined to 2 kB or more.

    Raises ConfigError, which names `option`, if the file is unreadable or too short.
    """
    pieces = [""]
    for paragraph in re.split(r"\n[ \t]*\n", contents(path, option)):
        pieces[-1] += paragraph + "\n\n"
        if len(pieces[-1]) >= 2048:
            pieces.append("")
    return pieces_corpus([piece for piece in pieces if piece.strip()], path, option)


def pieces_corpus(pieces: Sequence[str], path: Path, option: str) -> Corpus:
    """Split pieces of a file by their content. Raises ConfigError if they are too few."""
    if len(pieces) < _MIN_PIECES:
        why = f"a tenth is held out, which needs {_MIN_PIECES} of about 2 kB, or as many JSON lines"
        found = f"{path} with {len(pieces)} pieces between blank lines"
        raise ConfigError(Problem(option, found, why, "give more text"))
    named = {f"{i:07d} {content_hash(p)}": f"{p}\n\n".encode() for i, p in enumerate(pieces)}
    return split_topics(named, source=path.name)


def content_hash(text: str) -> str:
    """Return the hash by which texts are split."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def contents(path: Path, option: str) -> str:
    """Read a UTF-8 file that an option names. Raises ConfigError if it is unreadable."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why, remedy = f"it cannot be read: {error}", "give a file of text or JSON lines in UTF-8"
        raise ConfigError(Problem(option, str(path), why, remedy)) from error


def split_topics(topics: Mapping[str, bytes], *, source: str) -> Corpus:
    """Split by the SHA-256 of each topic's name."""
    largest = HELDOUT_SHARE * sum(map(len, topics.values()))
    heldout: set[str] = set()
    size = 0
    for name in sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest()):
        # A single huge topic must not be taken whole for the held-out part.
        if size < largest and size + len(topics[name]) <= 1.05 * largest:
            heldout.add(name)
            size += len(topics[name])
    parts = (
        b"".join(topics[name] for name in sorted(topics) if (name in heldout) == held_out)
        for held_out in (False, True)
    )
    return Corpus(source, *parts)


def python_topics() -> dict[str, bytes]:
    """Return the texts by topic: `reference: NAME`, or `module: PATH` below the library."""
    import pydoc_data.topics as reference

    topics: dict[str, bytes] = {}
    seen: set[str] = set()
    for name, text in reference.topics.items():
        # Several names can lead to one text, which must not end up on both sides.
        if text not in seen:
            seen.add(text)
            topics[f"reference: {name}"] = text.encode()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_sources(library)):
        docstrings = [d for d in dict.fromkeys(_docstrings(path)) if d not in seen and len(d) >= 40]
        if docstrings:
            seen.update(docstrings)
            name = path.relative_to(library).as_posix()
            topics[f"module: {name}"] = "\n\n".join([*docstrings, ""]).encode()
    return topics


def _sources(library: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(library):
        below[:] = [b for b in below if b not in _SKIPPED_FOLDERS and not b.startswith("config-")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that a newer parser warns of
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # Templates and files for another version: no loss to a corpus.
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # as ast.walk, past expressions, which are most of a tree
        for bodies in ("body", "handlers", "orelse", "finalbody", "cases"):
            nodes += getattr(node, bodies, ())
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            yield docstring.encode(errors="replace").decode()  # lone surrogates cannot be encoded


def llama(
    *,
    seed: int,
    hidden_size: int = 256,
    layers: int = 6,
    intermediate_size: int = 688,
    heads: int = 8,
    max_positions: int = 1024,
    **config: Any,
) -> torch.nn.Module:
    """Build a Llama in fp32 with untied embeddings; 4.9 million parameters by default.

    The seed decides the weights. `config` has more options of `LlamaConfig`; with `num_labels` the
    model is a classifier. Raises UnsupportedError if transformers is missing.
    """
    transformers = hugging_face()
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # bytes have none
    made = transformers.LlamaConfig(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        use_cache=False,
        **{"vocab_size": VOCAB_SIZE, **special, **config},
    )
    kind = "SequenceClassification" if "num_labels" in config else "CausalLM"
    return seeded(seed, lambda: getattr(transformers, f"LlamaFor{kind}")(made))


def seeded(seed: int, make: Callable[[], Any]) -> torch.nn.Module:
    """Make a model whose random weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = make()
        return model


def hugging_face(headline: str = "") -> Any:
    """Import transformers. Raises UnsupportedError if it is missing."""
    try:
        import transformers
    except ImportError as error:
        why, remedy = "models and checkpoints are Hugging Face's", "pip install 'ds_ckpt[hf]'"
        problem = Problem("transformers", "not installed", why, remedy)
        raise UnsupportedError(problem, headline=headline) from error
    return transformers


def versions() -> dict[str, Any]:
    """Return the versions of Python and the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("ds_ckpt", "deepspeed", "torch", "transformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def count_parameters(model: torch.nn.Module) -> int:
    """Count the parameters. Under ZeRO-3 call it before the model is partitioned."""
    return sum(parameter.numel() for parameter in model.parameters())
