"""What is trained: a model with its data, begun anew for every seed, and the tasks that say which.

One task is a language, all others are labelled examples; data and models are built in or a user's.
A `TaskSpec` is plain JSON, so that launched processes open the same task as the command does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.files import replacing
from ds_ckpt.lab import workload
from ds_ckpt.lab.validate import data
from ds_ckpt.lab.validate.data import PASSAGE, WORDS, Examples, Inputs, Text
from ds_ckpt.lab.validate.world import DENSE_SETTINGS, InProcessWorld, Recipe, digest_of
from ds_ckpt.lab.workload import hugging_face, seeded

Kind = Literal["language", "digits", "topics", "labelled"]
KINDS: tuple[Kind, ...] = ("language", "digits", "topics", "labelled")
DEFAULT_TASKS: tuple[Kind, ...] = ("language", "topics", "digits")
PRETRAINING_STEPS = 200
BETAS = (0.9, 0.95)

Build = Callable[[int], torch.nn.Module]
"""seed -> a model with that seed's weights; it answers with `loss`, and `logits` for classes."""


class Score(NamedTuple):
    """What a model is worth on held-out data.

    Attributes:
        loss: mean, in nats, of a token or of an example.
        accuracy: share of right answers, 0 to 1; None for tasks without.
    """

    loss: float
    accuracy: float | None = None


class Learner:
    """A model and its data, of one seed at a time.

    Weights, data and their order are functions of the seed, so runs of one seed make pairs, whoever
    trains them: virtual workers or ZeRO-3 processes.

    Args:
        build: makes the model of a seed.
        workers: that share the data.
        batch: rows of a worker's micro-batch.
        accumulation: micro-batches of a worker in a step.
        device: of the model; data is moved there.
        compiled: run the training forward and backward through `torch.compile`: a quarter faster
            after a minute, on machines with a C++ compiler.

    Attributes:
        model: trained in place by virtual workers.
        forward: what training calls in the model's place.
    """

    def __init__(
        self,
        data: Text | Examples,
        build: Build,
        *,
        workers: int = 2,
        batch: int = 8,
        accumulation: int = 1,
        device: str = "cpu",
        compiled: bool = False,
    ) -> None:
        self.data, self.workers, self.accumulation = data, workers, accumulation
        self._build, self._batch, self._device = build, batch, device
        self.model = self.initial(0).to(device)
        self.forward: Callable[..., Any] = torch.compile(self.model) if compiled else self.model
        self.begin(0)

    def begin(self, seed: int) -> None:
        """The weights and the data of `seed`, from the start."""
        self.model.load_state_dict(self.initial(seed).state_dict())
        self._seed = seed

    def initial(self, seed: int) -> torch.nn.Module:
        """A model with the weights of `seed`, in training mode."""
        return self._build(seed).train()

    def inputs(self, step: int, micro: int, worker: int) -> Inputs:
        """What the model is called with for a micro-batch of a worker. torch's random numbers begin
        anew with it, so that runs of one seed drop out the same entries, resumed or not."""
        (number,) = np.random.SeedSequence([self._seed, step, micro, worker]).generate_state(1)
        torch.manual_seed(int(number))
        drawn = step * self.accumulation + micro
        return self._moved(self.data.batch(self._seed, drawn, worker, self.workers, self._batch))

    def _moved(self, inputs: Inputs) -> Inputs:
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}

    def loss(self, step: int, micro: int, worker: int) -> Tensor:
        """As `world.Loss`."""
        loss: Tensor = self.forward(**self.inputs(step, micro, worker)).loss
        return loss

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module | None = None) -> Score:
        """Mean over the held-out data, the same part every time.

        Args:
            model: called in the place of this one's own, an engine for instance.
        """
        model = self.model if model is None else model
        losses, right, rows = [], 0, 0
        model.eval()
        try:
            for inputs in map(self._moved, self.data.evaluation()):
                output = model(**inputs)
                losses.append(output.loss.double())
                if isinstance(self.data, Examples):
                    right += int((output.logits.argmax(-1) == inputs["labels"]).sum())
                    rows += len(inputs["labels"])
        finally:
            model.train()
        return Score(float(torch.stack(losses).mean()), right / rows if rows else None)


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
        betas: AdamW's, in every run.
        dense_betas: in dense runs instead: those that a tuned optimizer has without compression.
        dense_lead: of the first moment, in dense runs. From the end of the longest warm-up that a
            run has: pairs share that beginning, without which seeds differ as if unpaired.
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
    betas: tuple[float, float] = BETAS
    dense_betas: tuple[float, float] | None = None
    dense_lead: float = 0.0

    @property
    def metric(self) -> Literal["loss", "accuracy"]:
        """What verdicts are on: relative held-out loss, or accuracy."""
        return "loss" if self.kind == "language" else "accuracy"

    @property
    def evaluate_every(self) -> int:
        """Steps from one evaluation to the next."""
        return max(1, self.steps // self.evaluations)

    def recipe(self, *, dense: bool = False) -> Recipe:
        """AdamW as in the demo, but for its betas and lead where they are given."""
        betas = self.dense_betas if dense and self.dense_betas else self.betas
        recipe = Recipe(self.steps, self.learning_rate, (betas[0], betas[1]))
        if not dense or not self.dense_lead:
            return recipe
        after = longest_warm_up(self.steps)
        return dataclasses.replace(recipe, lead=self.dense_lead, lead_after=after)

    def words(self) -> str:
        """The task in a few words."""
        data = self.data and Path(self.data).name
        usual = make_spec(self.kind, model=self.model).learning_rate
        micro = f", {self.accumulation} micro-batches a step" if self.accumulation > 1 else ""
        micro += f", learning rate {self.learning_rate:g}" if self.learning_rate != usual else ""
        micro += f", betas {_pair(self.betas)}" if tuple(self.betas) != BETAS else ""
        micro += f", dense with {_pair(self.dense_betas)}" if self.dense_betas else ""
        micro += f", dense with a lead of {self.dense_lead:g}" if self.dense_lead else ""
        if self.kind == "language":
            return f"language modelling on {data or 'the embedded corpus'}{micro}"
        if self.kind == "digits":
            return f"fine-tuning on scikit-learn's digits{micro}"
        return f"fine-tuning on {data or 'topics of the embedded corpus'}{micro}"


def longest_warm_up(steps: int) -> int:
    """Dense steps of a run, at most: a longer start would leave little to judge."""
    return int(0.25 * steps)


def _pair(betas: tuple[float, float]) -> str:
    return f"{betas[0]:g}, {betas[1]:g}"


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
class Task:
    """A task ready to run.

    Attributes:
        digest: of data and sizes: runs of equal digests can be compared.
        model: class and parameters of the model, in words.
        source: of the data, in words.
    """

    spec: TaskSpec
    learner: Learner
    digest: str
    model: str
    source: str
    shapes: tuple[tuple[str, torch.Size], ...]


def open_task(spec: TaskSpec, folder: Path, *, device: str = "cpu") -> Task:
    """Load the data and build the model.

    Args:
        folder: keeps pre-trained weights.

    Raises:
        ConfigError: the data cannot be used.
        UnsupportedError: a package that the task needs is missing, or a checkpoint is.
    """
    found, build = _language(spec) if spec.kind == "language" else _labelled(spec, folder)
    learner = Learner(
        found,
        build,
        workers=spec.world,
        batch=spec.batch,
        accumulation=spec.accumulation,
        device=device,
    )
    shapes = tuple((n, p.shape) for n, p in learner.model.named_parameters() if p.requires_grad)
    parameters = sum(shape.numel() for _, shape in shapes)
    model = f"{type(learner.model).__name__}, {parameters:,} parameters"
    if spec.model:
        model += f" ({spec.model})"
    sizes = dataclasses.asdict(spec)
    for name in ("betas", "dense_betas", "dense_lead"):
        del sizes[name]  # of single runs: see `experiment.Plan.key`
    if spec.attention == "eager":
        del sizes["attention"]
    if spec.data:  # wherever it lies
        sizes["data"] = "as its digest says"
    if device != "cpu":  # which computes other bits
        sizes["device"] = device
    if spec.model:  # a folder's content may change
        sizes["weights"] = digest_of(learner.model)
    said = json.dumps([found.sha256, sizes], sort_keys=True)
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    return Task(spec, learner, digest, model, found.source, shapes)


def _language(spec: TaskSpec) -> tuple[Text, Build]:
    corpus = data.read_text(spec.data) if spec.data else workload.embedded_corpus()
    if spec.model is None:
        build = small_llama(
            length=spec.length,
            attention=spec.attention,
            hidden_size=spec.hidden_size,
            layers=spec.layers,
            intermediate_size=8 * round(spec.hidden_size / 3),
            heads=4,
        )
        return Text.of_bytes(corpus, spec.length), build
    transformers = hugging_face()
    tokenizer = _loaded(transformers.AutoTokenizer, spec.model)
    train, heldout = (
        tokenizer(side.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        for side in (corpus.train, corpus.heldout)
    )
    text = Text.of_tokens(
        torch.tensor(train, dtype=torch.int64),
        torch.tensor(heldout, dtype=torch.int64),
        spec.length,
        corpus.source,
    )
    return text, _pretrained(transformers.AutoModelForCausalLM, spec.model)


def _labelled(spec: TaskSpec, folder: Path) -> tuple[Examples, Build]:
    if spec.kind == "digits":
        return data.digits(), vit
    if spec.kind == "topics":
        found = data.topics()
        return found, classifier(found.classes, begun=lambda: pretrained_llama(folder, found))
    if spec.data is None:
        why = "it trains on examples of yours"
        raise ConfigError(Problem("--tasks", "labelled without --data", why, "add --data FILE"))
    if spec.model is None:
        mine = data.read_labelled(spec.data, lambda t: data.words(t.encode()).tolist(), spec.length)
        return mine, classifier(mine.classes, spec.length)
    transformers = hugging_face()
    tokenizer = _loaded(transformers.AutoTokenizer, spec.model)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    mine = data.read_labelled(
        spec.data, lambda text: tokenizer(text)["input_ids"], spec.length, padding
    )
    return mine, _pretrained(
        transformers.AutoModelForSequenceClassification,
        spec.model,
        num_labels=mine.classes,
        pad_token_id=padding,
    )


# Models: fp32, their random weights drawn by the seed alone


def small_llama(*, length: int, attention: str = "eager", **sizes: int) -> Build:
    """`workload.llama` for sequences of so many bytes.

    Attention is computed without torch's fused kernel unless asked for: on CPU its backward takes
    longer than all matrix products together at these lengths.
    """

    def build(seed: int) -> torch.nn.Module:
        model = workload.llama(seed=seed, max_positions=length, **sizes)
        model.set_attn_implementation(attention)  # type: ignore[operator]
        return model

    return build


def vit(seed: int) -> torch.nn.Module:
    """A ViT of about 270,000 parameters for the digits."""
    transformers = hugging_face()
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=10,
        attn_implementation="eager",
    )
    return seeded(seed, lambda: transformers.ViTForImageClassification(config))


_LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 344,
    "max_position_embeddings": PASSAGE,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def classifier(
    classes: int, length: int = PASSAGE, begun: Callable[[], dict[str, Tensor]] | None = None
) -> Build:
    """A small Llama on words, under a head.

    Args:
        begun: gives the weights below the head, the same for every seed; None: nothing is learnt
            before.
    """
    transformers = hugging_face()
    sizes = {**_LLAMA, "max_position_embeddings": length, "num_labels": classes}

    def build(seed: int) -> torch.nn.Module:
        config = transformers.LlamaConfig(**sizes)
        model = seeded(seed, lambda: transformers.LlamaForSequenceClassification(config))
        if begun is not None:
            model.model.load_state_dict(begun())  # type: ignore[union-attr, operator]
        return model

    return build


def pretrained_llama(
    folder: Path, examples: Examples, steps: int = PRETRAINING_STEPS
) -> dict[str, Tensor]:
    """Weights of the classifier's Llama that has learnt the language of the examples' train side,
    as fine-tuning finds it. Trained at the first call, kept in `folder`."""
    path = folder / f"pretrained-{steps}-{examples.sha256[:16]}.pt"
    if not path.exists():
        transformers = hugging_face()
        config = transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True)
        ids = examples.train["input_ids"].flatten()
        learner = Learner(
            Text.of_tokens(ids, ids, PASSAGE, examples.source),
            lambda seed: seeded(seed, lambda: transformers.LlamaForCausalLM(config)),
            workers=1,
        )
        recipe = Recipe(steps=steps, learning_rate=3e-3)
        world = InProcessWorld(learner.model, learner.loss, recipe, DENSE_SETTINGS, workers=1)
        for _ in range(steps):
            world.train_step()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            torch.save(learner.model.model.state_dict(), unfinished)  # type: ignore[operator, union-attr]
    saved: dict[str, Tensor] = torch.load(path, weights_only=True)
    return saved


def _pretrained(auto: Any, name: str, **options: Any) -> Build:
    """The checkpoint's weights; what it has none of (a new head) is drawn by the seed."""

    def build(seed: int) -> torch.nn.Module:
        return seeded(seed, lambda: _loaded(auto, name, dtype=torch.float32, **options))

    return build


def _loaded(auto: Any, name: str, **options: Any) -> Any:
    """`auto.from_pretrained(name)`. Raises UnsupportedError where there is no such checkpoint."""
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            Problem(
                where="--model",
                found=name,
                why=f"{auto.__name__} cannot load it: {error}",
                remedy="give a checkpoint's folder, or a name that transformers finds",
            )
        ) from error
