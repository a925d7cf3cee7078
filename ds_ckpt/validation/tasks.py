"""From what the command asks for to a `Run`: the default tasks, and those on a user's data.

A `TaskSpec` is plain JSON, so that launched processes open the same task as the command does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.harness.corpus import embedded_corpus
from ds_ckpt.validation.cell import digest_of
from ds_ckpt.validation.checkpoints import loaded, pretrained, transformers_for
from ds_ckpt.validation.classification import ClassificationRun, ClassificationTask, Examples
from ds_ckpt.validation.data import Labelled, read_labelled, read_text, tokenized
from ds_ckpt.validation.language import LanguageRun, LanguageTask
from ds_ckpt.validation.run import Run
from ds_ckpt.validation.virtual_training import Recipe

Kind = Literal["language", "digits", "topics", "labelled"]
KINDS: tuple[Kind, ...] = ("language", "digits", "topics", "labelled")
DEFAULT_TASKS: tuple[Kind, ...] = ("language", "topics", "digits")


@dataclass(frozen=True)
class TaskSpec:
    """One task, sizes included.

    Attributes:
        kind: `language`: held-out loss of a language model. `digits`, `topics`: classifiers on the
            default sets. `labelled`: a classifier on `data`.
        data: a file or a data set's name; None: what is built in.
        model: a checkpoint's name or folder; None: what is built in.
        world: workers or processes. A process's own share of a gradient is exact in every method,
            so a few of them lose less than many.
        batch: sequences or examples of a micro-batch.
        length: tokens of a sequence, for text.
        evaluations: of the held-out data in a run.
        hidden_size, layers, attention: of the built-in language model. Eager attention is faster
            on a CPU; selective checkpointing names sdpa's operators.
    """

    kind: Kind
    data: str | None = None
    model: str | None = None
    world: int = 4
    batch: int = 2
    length: int = 64
    accumulation: int = 1
    steps: int = 300
    learning_rate: float = 3e-3
    evaluations: int = 6
    hidden_size: int = 128
    layers: int = 2
    attention: Literal["eager", "sdpa"] = "eager"

    @property
    def metric(self) -> Literal["loss", "accuracy"]:
        """What verdicts are on: relative held-out loss, or accuracy."""
        return "loss" if self.kind == "language" else "accuracy"

    @property
    def evaluate_every(self) -> int:
        """Steps from one evaluation to the next."""
        return max(1, self.steps // self.evaluations)

    def recipe(self) -> Recipe:
        """AdamW as in the demo."""
        return Recipe(steps=self.steps, learning_rate=self.learning_rate)

    def words(self) -> str:
        """The task in a few words."""
        data = self.data and Path(self.data).name
        micro = f", {self.accumulation} micro-batches a step" if self.accumulation > 1 else ""
        if self.kind == "language":
            return f"language modelling on {data or 'the embedded corpus'}{micro}"
        if self.kind == "digits":
            return f"fine-tuning on scikit-learn's digits{micro}"
        return f"fine-tuning on {data or 'topics of the embedded corpus'}{micro}"


_DEFAULTS: dict[Kind, dict[str, Any]] = {
    "language": {},
    "topics": {"batch": 8, "learning_rate": 2e-3, "steps": 240, "length": 32},
    "digits": {"batch": 8, "learning_rate": 2e-3, "steps": 300},
    "labelled": {"batch": 8, "learning_rate": 2e-3, "length": 128},
}


def make_spec(kind: Kind, **given: Any) -> TaskSpec:
    """The kind's sizes but for what is given; None counts as not given."""
    wanted = {name: value for name, value in given.items() if value is not None}
    if wanted.get("model") and "learning_rate" not in wanted:
        wanted["learning_rate"] = 5e-5  # a trained model's, not a new one's
    return TaskSpec(kind, **{**_DEFAULTS[kind], **wanted})


@dataclass(frozen=True)
class Opened:
    """A task ready to run.

    Attributes:
        digest: of data and sizes: runs of equal digests can be compared.
        model: class and parameters of the model, in words.
        source: of the data, in words.
    """

    spec: TaskSpec
    run: Run
    digest: str
    model: str
    source: str
    shapes: tuple[tuple[str, torch.Size], ...]


def open_task(spec: TaskSpec, folder: Path, *, device: str = "cpu") -> Opened:
    """Load the data and build the model.

    Args:
        folder: keeps pre-trained weights.

    Raises:
        ConfigError: the data cannot be used.
        UnsupportedError: a package that the task needs is missing, or a checkpoint is.
    """
    run: Run
    if spec.kind == "language":
        run, source, digest = _language(spec, device)
    else:
        examples, build = _classifier(spec, folder)
        task = ClassificationTask(spec.world, spec.batch, spec.accumulation)
        run = ClassificationRun(task, examples, build, device=device)
        source, digest = examples.source, examples.sha256
    shapes = tuple((n, p.shape) for n, p in run.model.named_parameters() if p.requires_grad)
    parameters = sum(shape.numel() for _, shape in shapes)
    model = f"{type(run.model).__name__}, {parameters:,} parameters"
    if spec.model:
        model += f" ({spec.model})"
    sizes = dataclasses.asdict(spec)
    if spec.attention == "eager":
        del sizes["attention"]
    if device != "cpu":  # which computes other bits
        sizes["device"] = device
    if spec.model:  # a folder's content may change
        sizes["weights"] = digest_of(run.model)
    said = json.dumps([digest, sizes], sort_keys=True)
    return Opened(spec, run, hashlib.sha256(said.encode()).hexdigest()[:16], model, source, shapes)


def _language(spec: TaskSpec, device: str) -> tuple[LanguageRun, str, str]:
    corpus = read_text(spec.data) if spec.data else embedded_corpus()
    sizes = LanguageTask(
        world=spec.world,
        sequences=spec.batch,
        sequence_length=spec.length,
        accumulation=spec.accumulation,
        evaluation_batches=24,
        hidden_size=spec.hidden_size,
        layers=spec.layers,
        intermediate_size=8 * round(spec.hidden_size / 3),
        heads=4,
    )
    if spec.model is None:
        built_in = LanguageRun(sizes, corpus, attention=spec.attention, device=device)
        return built_in, corpus.source, corpus.sha256
    transformers = transformers_for(spec.model)
    tokens = tokenized(corpus, loaded(transformers.AutoTokenizer, spec.model))
    build = pretrained(transformers.AutoModelForCausalLM, spec.model)
    run = LanguageRun(sizes, tokens, build=build, device=device)
    return run, corpus.source, tokens.sha256


def _classifier(spec: TaskSpec, folder: Path) -> tuple[Examples, Callable[[int], torch.nn.Module]]:
    from ds_ckpt.validation import examples

    if spec.kind == "digits":
        return examples.digits(), examples.vit
    if spec.kind == "topics":
        found = examples.topics()
        return found, examples.TopicClassifier(folder, found)
    if spec.data is None:
        why = "it trains on examples of yours"
        raise ConfigError(Problem("--tasks", "labelled without --data", why, "add --data FILE"))
    labelled = read_labelled(spec.data)
    if spec.model is None:
        found = _encoded(labelled, lambda text: examples.words(text.encode()).tolist(), spec, 0)
        return found, examples.small_classifier(labelled.classes, spec.length)
    transformers = transformers_for(spec.model)
    tokenizer = loaded(transformers.AutoTokenizer, spec.model)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    found = _encoded(labelled, lambda text: tokenizer(text)["input_ids"], spec, padding)
    build = pretrained(
        transformers.AutoModelForSequenceClassification,
        spec.model,
        num_labels=labelled.classes,
        pad_token_id=padding,
    )
    return found, build


def _encoded(
    labelled: Labelled, encode: Callable[[str], list[int]], spec: TaskSpec, padding: int
) -> Examples:
    """Cut or filled up to `spec.length` tokens, with a mask."""

    def rows(side: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        ids = torch.full((len(side), spec.length), padding, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (text, _) in enumerate(side):
            found = encode(text)[: spec.length]
            ids[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
            mask[row, : max(1, len(found))] = 1
        labels = torch.tensor([label for _, label in side])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return Examples(rows(labelled.train), rows(labelled.heldout), labelled.classes, labelled.source)
