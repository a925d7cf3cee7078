"""The built-in workload: a Llama from scratch, and the text of every Python installation as bytes.

The text is the language reference of `help()` (`pydoc_data.topics`) and the docstrings of the
standard library, read from its source with `ast`. A topic is one entry of the reference or one
module. Topics are split into train and held-out text, and no docstring occurs twice. One Python
version has one corpus. Nothing is downloaded.
"""

from __future__ import annotations

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

import numpy as np
import torch

from ds_ckpt.errors import ConfigError, Problem, UnsupportedError

VOCAB_SIZE = 256
"""Bytes are the tokens."""

HELDOUT_SHARE = 0.1
_MIN_PIECES = 20
# Parts of the library directory that are not documentation: tests, other people's packages.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
)
_MIN_DOCSTRING_CHARACTERS = 40


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
        digest.update(self.train)
        digest.update(self.heldout)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write `train.bin` and `heldout.bin`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.bin").write_bytes(self.train)
        (folder / "heldout.bin").write_bytes(self.heldout)


def load_corpus(folder: Path) -> Corpus:
    """Read a folder that `Corpus.save` wrote."""
    return Corpus(
        source=str(folder),
        train=(folder / "train.bin").read_bytes(),
        heldout=(folder / "heldout.bin").read_bytes(),
    )


@cache
def embedded_corpus() -> Corpus:
    """Return the corpus of the running Python, a tenth of it held out."""
    return split_topics(python_topics(), source="pydoc_data.topics and stdlib docstrings")


def file_corpus(path: Path, option: str = "--text") -> Corpus:
    """Read a text file; topics are its paragraphs, joined to 2 kB or more.

    `option` is named in errors. Raises ConfigError if the file is unreadable or too short.
    """
    pieces, gathered = [], ""
    for paragraph in re.split(r"\n[ \t]*\n", contents(path, option, errors="replace")):
        gathered += paragraph + "\n\n"
        if len(gathered) >= 2048:
            pieces.append(gathered)
            gathered = ""
    return pieces_corpus([*pieces, gathered] if gathered.strip() else pieces, path, option)


def pieces_corpus(pieces: Sequence[str], path: Path, option: str) -> Corpus:
    """Split pieces of a file by their content. Raises ConfigError if they are too few."""
    if len(pieces) < _MIN_PIECES:
        raise ConfigError(
            Problem(
                where=option,
                found=f"{path} with {len(pieces)} pieces of text",
                why=f"about a tenth is held out, which needs {_MIN_PIECES} of about 2 kB that end "
                "at blank lines, or as many lines of JSON",
                remedy="give more text",
            ),
            headline="the data cannot be used",
        )
    named = {f"{i:07d} {content_hash(p)}": f"{p}\n\n".encode() for i, p in enumerate(pieces)}
    return split_topics(named, source=path.name)


def content_hash(text: str) -> str:
    """Return the hash by which texts are split."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def contents(path: Path, option: str, *, errors: str = "strict") -> str:
    """Read a text file that an option names. Raises ConfigError if it is unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except OSError as error:
        why = f"the file cannot be read: {error.strerror or error}"
        remedy = "give the path of a file of text or JSON lines"
        raise ConfigError(Problem(option, str(path), why, remedy)) from error
    except UnicodeDecodeError as error:
        why = f"JSON is UTF-8; byte {error.start} is not"
        raise ConfigError(Problem(option, str(path), why, "save the file as UTF-8")) from error


def split_topics(topics: Mapping[str, bytes], *, source: str) -> Corpus:
    """Split by the SHA-256 of each topic's name."""
    order = sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest())
    total_bytes = sum(len(text) for text in topics.values())
    heldout: set[str] = set()
    heldout_bytes = 0
    for name in order:
        size = len(topics[name])
        # A single huge topic must not be taken whole for the held-out part.
        if heldout_bytes + size > HELDOUT_SHARE * 1.05 * total_bytes:
            continue
        heldout.add(name)
        heldout_bytes += size
        if heldout_bytes >= HELDOUT_SHARE * total_bytes:
            break
    sides = (
        b"".join(topics[name] for name in sorted(topics) if (name in heldout) == held_out)
        for held_out in (False, True)
    )
    return Corpus(source, *sides)


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
        parts = path.relative_to(library).parts
        docstrings = []
        for docstring in _docstrings(path):
            if len(docstring) >= _MIN_DOCSTRING_CHARACTERS and docstring not in seen:
                seen.add(docstring)
                docstrings.append(docstring)
        if docstrings:
            topics[f"module: {'/'.join(parts)}"] = "\n\n".join([*docstrings, ""]).encode()
    return topics


def _sources(library: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(library):
        below[:] = [b for b in below if b not in _SKIPPED_FOLDERS and not b.startswith("config-")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # Some library files hold escapes that a newer parser warns of.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # Templates and files for another version: no loss to a corpus.
    level: list[ast.AST] = [tree]
    for node in level:  # in breadth, and without expressions, which hold no docstrings
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            level += getattr(node, block, ())
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                # Lone surrogates cannot be encoded.
                yield docstring.encode(errors="replace").decode()


def training_batch(
    text: bytes | torch.Tensor,
    *,
    sequences: int,
    sequence_length: int,
    seed: int,
    step: int,
    process: int,
) -> torch.Tensor:
    """Draw random windows, a function of (seed, step, process) alone.

    Returns token ids of shape (sequences, sequence_length), int64, on the CPU.
    """
    if len(text) <= sequence_length:
        raise ConfigError(
            Problem(
                where="text",
                found=f"{len(text)} bytes",
                why=f"a window takes {sequence_length} bytes",
                remedy="give a longer text or a shorter sequence length",
            )
        )
    tokens = _tokens(text)
    # numpy's seed sequence mixes the three numbers; its streams are fixed by its own policy.
    random = np.random.default_rng([seed, step, process])
    starts = random.integers(0, len(tokens) - sequence_length, size=sequences)
    return torch.stack([tokens[start : start + sequence_length] for start in starts]).long()


def evaluation_batches(
    text: bytes | torch.Tensor,
    *,
    sequences: int,
    sequence_length: int,
    batches: int,
    process: int,
    processes: int,
) -> Iterator[torch.Tensor]:
    """Yield fixed windows, spread evenly over the text and dealt out to the processes.

    Every process gets the same number of batches, which ZeRO-3's all-gathers require. Shape and
    type are those of `training_batch`.
    """
    tokens = _tokens(text)
    wanted = batches * sequences * processes
    starts = np.linspace(0, len(tokens) - sequence_length, num=wanted).astype(np.int64)
    mine = starts[process::processes].reshape(batches, sequences)
    for rows in mine:
        yield torch.stack([tokens[s : s + sequence_length] for s in rows]).long()


def _tokens(text: bytes | torch.Tensor) -> torch.Tensor:
    if isinstance(text, torch.Tensor):  # ids of a tokenizer
        return text
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def llama(
    *,
    seed: int,
    hidden_size: int = 256,
    layers: int = 6,
    intermediate_size: int = 688,
    heads: int = 8,
    max_positions: int = 1024,
) -> torch.nn.Module:
    """Build a Llama in fp32 with untied embeddings; 4.9 million parameters by default.

    The seed decides the weights. Raises UnsupportedError if transformers is missing.
    """
    transformers = hugging_face()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        use_cache=False,
        # Bytes have no special tokens.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return seeded(seed, lambda: transformers.LlamaForCausalLM(config))


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
        raise UnsupportedError(
            Problem(
                where="transformers",
                found="not installed",
                why="the models of experiments are Hugging Face's, and so are checkpoints",
                remedy="install the extra: pip install 'ds_ckpt[hf]'",
            ),
            headline=headline,
        ) from error
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
