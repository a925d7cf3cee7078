"""The task of a comparison: its sizes, its data and its model, initialized for every seed.

A `TaskSpec` is plain JSON, so that launched ranks open the same task as the command.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.lab import workload
from ds_ckpt.lab.validate import data
from ds_ckpt.lab.validate.data import Encode, Examples, Inputs, Text
from ds_ckpt.lab.validate.world import Recipe

Kind = Literal["language", "labelled"]
BETAS = (0.9, 0.95)
Build = Callable[[int], torch.nn.Module]
"""seed -> a model whose output has `loss`, and `logits` if it is a classifier."""


@dataclass(frozen=True)
class TaskSpec:
    """Kind and sizes of a task.

    Attributes:
        model: name or folder of a checkpoint; None is a new model of `hidden_size` and `layers`.
        world: number of workers or ranks. A rank's own part of a gradient is exact in every
            method. So a few of them lose less than many.
        dense_correction: momentum correction of dense runs, after a quarter of the steps.
    """

    kind: Kind = "language"
    data: str | None = None
    model: str | None = None
    world: int = 4
    batch: int = 2
    length: int = 64
    accumulation: int = 1
    steps: int = 300
    learning_rate: float = 3e-3
    betas: tuple[float, float] = BETAS
    dense_correction: float = 0.0
    hidden_size: int = 128
    layers: int = 2

    @property
    def metric(self) -> Literal["loss", "accuracy"]:
        """Return the metric of verdicts: relative held-out loss, or accuracy."""
        return "loss" if self.kind == "language" else "accuracy"

    def recipe(self, *, dense: bool = False) -> Recipe:
        """Return optimizer and schedule of a dense or a compressed run."""
        return Recipe(
            self.steps,
            self.learning_rate,
            (self.betas[0], self.betas[1]),
            momentum_correction=self.dense_correction if dense else 0.0,
            correction_start=self.steps // 4,
        )

    def describe(self) -> str:
        """Describe the task in a few words."""
        name = Path(self.data).name if self.data else "the embedded corpus"
        verb = "language modelling" if self.kind == "language" else "fine-tuning"
        words = [f"{verb} on {name}"]
        if self.accumulation > 1:
            words.append(f"{self.accumulation} micro-batches a step")
        if self.learning_rate != make_spec(self.kind, model=self.model).learning_rate:
            words.append(f"learning rate {self.learning_rate:g}")
        if tuple(self.betas) != BETAS:
            words.append(f"betas {self.betas[0]:g}, {self.betas[1]:g}")
        if self.dense_correction:
            words.append(f"dense correction {self.dense_correction:g}")
        return ", ".join(words)


DEFAULTS: dict[Kind, dict[str, Any]] = {
    "language": {},
    "labelled": {"batch": 8, "learning_rate": 2e-3, "length": 128},
}


def make_spec(kind: Kind, **given: Any) -> TaskSpec:
    """Return the default sizes of a kind, overridden by all that is given and not None."""
    wanted = {name: value for name, value in given.items() if value is not None}
    if "data" in wanted:
        wanted["data"] = str(wanted["data"])
    if wanted.get("model"):
        wanted.setdefault("learning_rate", 5e-5)  # for fine-tuning
    return TaskSpec(kind, **{**DEFAULTS[kind], **wanted})


class Task:
    """A model and its data, for one seed at a time.

    Weights, data and their order are functions of the seed, so runs of one seed form pairs. `build`
    creates the model of a seed.

    Attributes:
        model: trained in place by virtual workers.
        digest: of data and sizes; runs of equal digests are comparable.
    """

    def __init__(
        self, spec: TaskSpec, data: Text | Examples, build: Build, *, device: str = "cpu"
    ) -> None:
        self.spec, self.data, self._build, self._device = spec, data, build, device
        self.model = self.initial(0).to(device)
        trainable = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.shapes = [(name, parameter.shape) for name, parameter in trainable]
        sizes = {**dataclasses.asdict(spec), "data": data.sha256, "device": device}
        if spec.model:  # a folder's content may change
            sizes["weights"] = _digest(self.model)
        text = json.dumps(sizes, sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.begin(0)

    def describe_model(self) -> str:
        """Return class, size and origin of the model."""
        parameters = sum(shape.numel() for _, shape in self.shapes)
        origin = f" ({self.spec.model})" if self.spec.model else ""
        return f"{type(self.model).__name__}, {parameters:,} parameters{origin}"

    def begin(self, seed: int) -> None:
        """Reset weights and data to the start of `seed`."""
        self.model.load_state_dict(self.initial(seed).state_dict())
        self._seed = seed

    def initial(self, seed: int) -> torch.nn.Module:
        """Return a new model with the weights of `seed`, in training mode."""
        return self._build(seed).train()

    def inputs(self, step: int, micro: int, worker: int) -> Inputs:
        """Return a micro-batch of a worker and seed torch's random numbers, for dropout."""
        (number,) = np.random.SeedSequence([self._seed, step, micro, worker]).generate_state(1)
        torch.manual_seed(int(number))
        spec, drawn = self.spec, step * self.spec.accumulation + micro
        return self._moved(self.data.batch(self._seed, drawn, worker, spec.batch))

    def _moved(self, inputs: Inputs) -> Inputs:
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}

    def loss(self, step: int, micro: int, worker: int) -> Tensor:
        """Implement `world.Loss`."""
        loss: Tensor = self.model(**self.inputs(step, micro, worker)).loss
        return loss

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> float:
        """Return the held-out loss in nats, or accuracy, of the model or an engine."""
        losses, right = [], []
        model.eval()
        for inputs in map(self._moved, self.data.evaluation()):
            output = model(**inputs)
            losses.append(output.loss.double())
            if isinstance(self.data, Examples):
                right.append(output.logits.argmax(-1) == inputs["labels"])
        model.train()
        return float(torch.cat(right).double().mean() if right else torch.stack(losses).mean())


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def open_task(spec: TaskSpec, *, device: str = "cpu") -> Task:
    """Load the data and build the model.

    Raises ConfigError for unusable data, UnsupportedError without transformers or checkpoint.
    """
    is_text, path = spec.kind == "language", Path(spec.data or "")
    content: Text | Examples
    encode: Encode | None = None
    options: dict[str, Any] = {}
    padding = 0
    if spec.model:
        tokenizer = _load("AutoTokenizer", spec.model)
        padding = tokenizer.pad_token_id or 0

        encode = lambda text: tokenizer(text, add_special_tokens=not is_text)["input_ids"]  # noqa: E731
    if is_text:
        corpus = data.read_text(path) if spec.data else workload.embedded_corpus()
        content = Text.of(corpus, spec.length, encode=encode)
    else:
        content = data.read_labelled(path, encode or data.word_ids, spec.length, padding)
        options = {"num_labels": content.classes, "pad_token_id": padding}

    def build(seed: int) -> torch.nn.Module:
        if spec.model is not None:
            auto = f"AutoModelFor{'CausalLM' if is_text else 'SequenceClassification'}"
            load = functools.partial(_load, auto, spec.model, dtype=torch.float32, **options)
            return workload.seeded(seed, load)  # weights that the checkpoint lacks are drawn
        return workload.llama(
            seed=seed,
            hidden_size=spec.hidden_size,
            layers=spec.layers,
            intermediate_size=8 * round(spec.hidden_size / 3),
            heads=4,
            max_positions=spec.length,
            # on a CPU the backward of torch's fused kernel is slow at these lengths
            attn_implementation="eager",
            vocab_size=workload.VOCAB_SIZE if is_text else data.VOCABULARY,
            **options,
        )

    return Task(spec, content, build, device=device)


def _load(kind: str, name: str, **options: Any) -> Any:
    """Load a checkpoint with a class of transformers. Raises UnsupportedError if there is none."""
    try:
        return getattr(workload.hugging_face(), kind).from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        why, remedy = f"{kind} cannot load it: {error}", "give a checkpoint's folder or hub name"
        raise UnsupportedError(Problem("--model", name, why, remedy)) from error
