"""Tasks and data: a user's files and checkpoints, the corpus, virtual workers, a run's loop."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ckpt.compression import EntropyCoded, LowRank, Quantize
from ds_ckpt.compression.topk import TopK
from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.exchange import exchange
from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings
from ds_ckpt.exchange.metric import EVERY
from ds_ckpt.lab import workload
from ds_ckpt.lab.validate import world as worlds
from ds_ckpt.lab.validate.data import Examples, Text, has_labels, read_labelled, read_text
from ds_ckpt.lab.validate.experiment import train
from ds_ckpt.lab.validate.task import Task, TaskSpec, make_spec, open_task
from ds_ckpt.lab.validate.world import DENSE_SETTINGS as DENSE

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def lines(path: Path, rows: list[Any], end: str = "\n") -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + end for row in rows))
    return path


def labelled(path: Path, count: int = 60) -> Path:
    words = {"up": "high above the sky", "down": "low under the ground"}
    rows = [{"text": f"{words[name]} {i}", "label": name} for i in range(count) for name in words]
    return lines(path, rows)


def texts(side: dict[str, torch.Tensor]) -> list[str]:
    kept = zip(side["input_ids"], side["attention_mask"], strict=True)
    return [bytes(ids[mask.bool()].tolist()).decode() for ids, mask in kept]


def read(path: Path) -> Examples:
    return read_labelled(path, lambda text: list(text.encode()), 64)


def test_json_lines_are_texts_and_examples(tmp_path: Path) -> None:
    source = labelled(tmp_path / "d.jsonl")
    assert has_labels(source)
    found = read(source)
    assert found.classes == 2
    assert len(found.train["labels"]) + len(found.heldout["labels"]) == 120
    train, heldout = texts(found.train), texts(found.heldout)
    assert not set(train) & set(heldout)
    labels = zip(train, found.train["labels"].tolist(), strict=True)
    assert {label for text, label in labels if "sky" in text} == {1}
    corpus = read_text(source)
    assert b"low under the ground 7" in corpus.train + corpus.heldout
    assert not has_labels(lines(tmp_path / "p.jsonl", [{"text": "x"}]))
    rows = [{"text": f"one\u2028line {i}", "label": i % 2} for i in range(60)]
    found = read(lines(tmp_path / "other.jsonl", rows, "\r\n"))
    assert len(found.train["labels"]) + len(found.heldout["labels"]) == 60


WRONG = 'not json -> :1; {"label": 1} -> KeyError: .text; [1, 2] -> not an object; '
WRONG += '{"text": "a", "label": 1} -> two classes; {"text": "a"} -> no label; '
WRONG += '{"text": "caf\xe9", "label": 1} -> UTF-8'


@pytest.mark.parametrize("row", WRONG.split("; "))
def test_wrong_examples_are_named_by_their_line(tmp_path: Path, row: str) -> None:
    content, words = row.split(" -> ")
    path = tmp_path / "d.jsonl"
    path.write_bytes(content.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=words) as caught:
        read(path)
    assert "d.jsonl" in str(caught.value)


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("\n \n".join("words " * 500 for _ in range(40)))  # about 12 kB are held out
    with pytest.raises(ConfigError, match="shorter --length"):
        open_task(make_spec("language", data=path, length=16_000))
    path.write_text("short")
    with pytest.raises(ConfigError, match="20 of about 2 kB"):
        read_text(path)


def save_checkpoint(folder: Path, width: int = 16) -> None:
    """A tiny Llama with a tokenizer of words, as `save_pretrained` leaves them."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "sky": 1, "ground": 2, "word": 3}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]", eos_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=width, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_a_checkpoint_is_tuned_on_texts_and_on_examples(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_checkpoint(model)
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join("sky ground word " * 60 + str(i) for i in range(80)))
    spec = make_spec("language", data=text, model=str(model), batch=2, length=8)
    assert spec.learning_rate == 5e-5
    task = open_task(spec)
    first, again = (task.initial(seed).state_dict() for seed in (0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert task.inputs(0, 0, 0)["input_ids"].max() <= 3
    assert torch.isfinite(task.loss(0, 0, 0))

    source = labelled(tmp_path / "d.jsonl")
    spec = make_spec("labelled", data=source, model=str(model), batch=4, length=8)
    task = open_task(spec)
    inputs = task.inputs(0, 0, 1)
    assert inputs["input_ids"].shape == (4, 8)
    assert inputs["attention_mask"].sum() < 32
    heads = [task.initial(seed).score.weight for seed in (0, 1, 0)]  # type: ignore[union-attr]
    assert not torch.equal(heads[0], heads[1])  # type: ignore[arg-type]
    assert torch.equal(heads[0], heads[2])  # type: ignore[arg-type]
    assert torch.isfinite(task.loss(0, 0, 0))

    # one that was trained on is another task
    assert open_task(spec).digest == task.digest
    trained = transformers.LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        trained.model.norm.weight.add_(1)
    trained.save_pretrained(model)
    assert open_task(spec).digest != task.digest
    with pytest.raises(UnsupportedError, match="--model"):
        open_task(make_spec("language", data=text, model=str(tmp_path / "nothing")))


def test_own_examples_without_a_checkpoint_and_their_digest(tmp_path: Path) -> None:
    def opened(name: str = "d.jsonl", device: str = "cpu", **sizes: Any) -> Task:
        given = {"data": tmp_path / name, "batch": 4, "length": 8, **sizes}
        return open_task(make_spec("labelled", **given), device=device)

    labelled(tmp_path / "d.jsonl")
    task = opened()
    assert torch.isfinite(task.loss(0, 0, 0))
    assert 0 <= task.evaluate(task.model) <= 1
    labelled(tmp_path / "moved.jsonl")
    assert opened().digest == opened("moved.jsonl").digest == task.digest
    for other in ({"length": 9}, {"betas": (0.7, 0.95)}, {"dense_correction": 0.3}):
        assert opened(**other).digest != task.digest  # type: ignore[arg-type]
    assert opened(device="cpu:0").digest != task.digest
    labelled(tmp_path / "d.jsonl", 70)
    assert opened().digest != task.digest


def test_runs_of_one_seed_draw_and_drop_out_the_same() -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, **_: Any) -> Any:
            kept = torch.nn.functional.dropout(self.weight + torch.ones(64), 0.5, self.training)
            return SimpleNamespace(loss=(kept * torch.arange(64)).sum() + x.float().std())

    rows = {"x": torch.arange(50), "labels": torch.arange(50)}
    task = Task(TaskSpec(world=2, batch=2), Examples(rows, rows, 50, "toy"), lambda _: Dropping())
    places = [(0, 0, 0), (0, 0, 1), (1, 0, 0)]

    def losses(seed: int) -> list[float]:
        task.begin(seed)
        return [task.loss(*place).item() for place in places]

    first, other = losses(1), losses(2)
    assert losses(1) == first
    assert len({*first, *other}) == 6
    task.begin(1)
    assert task.loss(*places[2]).item() == first[2]  # independent of earlier steps


@pytest.fixture(scope="module")
def corpus() -> workload.Corpus:
    return workload.embedded_corpus()


@pytest.mark.slow
def test_another_process_with_another_hash_seed_gets_the_same(corpus) -> None:
    share = len(corpus.heldout) / (len(corpus.train) + len(corpus.heldout))
    assert share == pytest.approx(workload.HELDOUT_SHARE, rel=0.2)
    assert len(corpus.train) > 1_000_000
    code = "from ds_ckpt.lab.workload import embedded_corpus as c; print(c().sha256)"
    command, environment = [sys.executable, "-c", code], {"PYTHONHASHSEED": "7", "LC_ALL": "C"}
    said = subprocess.check_output(command, env=environment, text=True, timeout=120)
    assert said.strip() == corpus.sha256


def test_side_of_a_topic_does_not_hang_on_the_order_given() -> None:
    topics = {f"t{i}": f"<{i}>".encode() * (50 + i) for i in range(100)}
    found = workload.split_topics(topics, source="x")
    assert found == workload.split_topics(dict(reversed(topics.items())), source="x")
    # and no topic stands on both sides
    assert all((text in found.train) != (text in found.heldout) for text in topics.values())


def test_batches_depend_on_seed_step_and_process_only(corpus: workload.Corpus) -> None:
    text = Text.of(corpus, 64)

    def batch(seed: int, step: int, process: int) -> torch.Tensor:
        return text.batch(seed, step, process, 3)["input_ids"]

    first = batch(1, 5, 0)
    assert torch.equal(first, batch(1, 5, 0))
    assert (first.shape, first.dtype) == ((3, 64), torch.int64)
    for other in (batch(1, 6, 0), batch(1, 5, 1), batch(2, 5, 0)):
        assert not torch.equal(first, other)
    with pytest.raises(ConfigError, match="a sequence takes 64"):
        Text.of(workload.Corpus("x", b"x" * 64, b"x"), 64)


@pytest.mark.parametrize("content", [None, "", "a short text\n\n"])
def test_an_unusable_file_is_refused_with_a_message(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--data") as caught:
        workload.file_corpus(path, "--data")
    assert "fix:" in str(caught.value)


def lossy(method: Any, warmup_steps: int = 0, **more: Any) -> Any:
    return ExchangeSettings(MethodSettings(method, **more), warmup_steps=warmup_steps, min_numel=0)


FOUR_BITS = lossy("quantize", bits=4)


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = torch.nn.Linear(6, 40), torch.nn.Linear(40, 3)
        self.idle = torch.nn.Linear(2, 1)  # no loss reaches it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return y


def training(settings: ExchangeSettings, **recipe: Any) -> tuple[_Net, worlds.InProcessWorld]:
    model = _Net()

    def loss(step: int, micro: int, worker: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + worker)
        x = torch.randn(5, 6, generator=generator)
        return torch.nn.functional.mse_loss(model(x), x[:, :3].sin())

    given = worlds.Recipe(steps=8, learning_rate=1e-2, **recipe)
    return model, worlds.InProcessWorld(model, loss, given, settings, workers=2)


def test_the_warm_up_is_the_dense_run_which_can_have_a_correction() -> None:
    settings = dataclasses.replace(lossy("topk", 3, density=0.1), momentum=0.3)
    dense_model, dense = training(DENSE)
    model, ours = training(settings)
    corrected_model, corrected = training(DENSE, momentum_correction=0.3, correction_start=3)
    for _ in range(3):
        for world in (dense, ours, corrected):
            world.train_step()
    weights = [list(each.parameters()) for each in (dense_model, model, corrected_model)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*weights, strict=True))
    feedback = ours.workers.feedbacks[0]
    assert feedback is not None
    assert feedback.steps == 3  # as in real processes: the rounding of residuals depends on it
    for world in (dense, ours, corrected):
        world.train_step()
    up = [each.up.weight for each in (dense_model, model, corrected_model)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(up, 2))


def test_a_step_that_is_not_finite_is_skipped() -> None:
    model, ours = training(lossy("topk", density=0.1))
    ours.train_step()
    with torch.no_grad():
        model.down.bias[0] = torch.inf
    before = model.up.weight.clone()
    assert ours.train_step().skipped
    assert ours.workers.step == 2
    assert torch.equal(before, model.up.weight)


def test_large_embeddings_go_as_in_a_session() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8192, 16), torch.nn.Linear(16, 16))
    world = worlds.InProcessWorld(
        model, lambda *_: torch.zeros(()), worlds.Recipe(1), lossy("powersgd", rank=2), workers=2
    )
    choose = world.workers.states[0].exchange.choose
    shape = torch.Size((8192, 16))
    assert isinstance(choose("0.weight", shape), TopK)
    assert isinstance(choose("other.weight", shape), LowRank)


def test_a_fallback_ends_a_warm_up_in_few_bits() -> None:
    settings = dataclasses.replace(lossy("entropy_coded", 5), warmup_bits=4)
    sent = [0]
    virtual = worlds.VirtualWorkers(settings, 2, ["w"])
    for step in range(4):
        for state in virtual.states:
            state.is_disabled = step >= 2
        virtual.average([[torch.randn(64, 64)] for _ in range(2)])
        virtual.step_ended(skipped=False)
        sent.append(virtual.sent_bytes)
    steps = [after - before for before, after in itertools.pairwise(sent)]
    assert steps[0] == steps[1] < 0.2 * steps[2] == 0.2 * steps[3]
    assert not any(bool(r.any()) for f in virtual.feedbacks if f for r in f.state_dict().values())


def test_kernels_of_the_warm_up_are_tried_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(exchange, "on_host", lambda device: False)
    for codec in (EntropyCoded, Quantize):
        monkeypatch.setattr(codec, "pack_rows", lambda self, *_: tried.append(self.describe()))
        monkeypatch.setattr(codec, "unpack_add_rows", lambda *_: None)
    settings = dataclasses.replace(lossy("entropy_coded", 5), warmup_bits=4)
    (state, _) = worlds.VirtualWorkers(settings, 2, ["w", "norm"]).states
    shapes = [("w", torch.Size([64, 64])), ("norm", torch.Size([64]))]
    state.reserve(shapes, torch.device("cpu"))
    # each at an address that is a multiple of 16, and at one that is not
    assert tried == [EntropyCoded().describe()] * 2 + [Quantize(bits=4).describe()] * 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_uncompressed_tensors_are_not_sampled(accumulation: int) -> None:
    """Also if they accumulate with the others."""
    settings = dataclasses.replace(lossy("entropy_coded"), momentum=0.3, min_numel=1000)
    torch.manual_seed(0)
    whole = [[torch.randn(64, 64), 9 * torch.randn(900)] for _ in range(4)]
    kept = []
    for names in (["w"], ["w", "whole"]):
        virtual = worlds.VirtualWorkers(settings, 4, names, accumulation=accumulation)
        virtual.sample(True)
        for micro in range(accumulation):
            parts = [[g / accumulation for g in of[: len(names)]] for of in whole]
            virtual.average(parts, at_boundary=micro + 1 == accumulation)
        energies = virtual.take_energies()
        virtual.step_ended(skipped=False)
        kept.append((energies, virtual.momentum_correction))
    assert kept[0] == kept[1]
    assert kept[0][1] == 0.3


def test_a_run_ends_or_stops_if_it_is_not_finite() -> None:
    rates = [worlds.Recipe(steps=100, learning_rate=1.0).rate(step) for step in (0, 9, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.525, 0.05])
    model, world = training(lossy("topk", 2, density=0.1))
    evaluated: Any = SimpleNamespace(evaluate=lambda model: model.up.weight.norm().item())
    reported: list[int] = []
    found = train(evaluated, model, world.train_step, 8, lambda done, _: reported.append(done))
    assert [step for step, _ in found.heldout] == [0, 8]
    assert found.heldout[-1][1] == model.up.weight.norm().item()
    assert not found.diverged
    assert reported == [8]
    model, world = training(DENSE)
    with torch.no_grad():
        model.up.weight.fill_(torch.nan)
    assert train(evaluated, model, world.train_step, 8).diverged
    assert world.workers.step == 1


def test_sixteen_bit_bytes() -> None:
    world = 4
    shapes = [("a", torch.Size([64, 64])), ("b", torch.Size([64]))]
    dense = worlds.sixteen_bit_step_bytes(DENSE, shapes, world)
    share = (world - 1) / world
    assert dense == pytest.approx(2 * (64 * 64 + 64) * share + 8 * (world - 1), rel=0.01)
    four = dataclasses.replace(FOUR_BITS, warmup_steps=9)
    expected = 64 * 64 * 4.25 / 8 * share + 128 * share + 8 * (world - 1)
    sent = worlds.sixteen_bit_step_bytes(four, shapes, world)
    assert sent == pytest.approx(expected, rel=0.02)
    # accumulated steps send less often only where they wait
    assert worlds.sixteen_bit_step_bytes(DENSE, shapes[:1], 2, accumulation=3) == 3 * (
        worlds.sixteen_bit_step_bytes(DENSE, shapes[:1], 2)
    )
    once = worlds.sixteen_bit_step_bytes(four, shapes[:1], world, accumulation=3)
    assert once == worlds.sixteen_bit_step_bytes(four, shapes[:1], world)
    each = dataclasses.replace(four, when="micro_step")
    assert worlds.sixteen_bit_step_bytes(each, shapes[:1], world, accumulation=3) == 3 * once
    energy, steps = (
        worlds.sixteen_bit_step_bytes(lossy("entropy_coded", metric=metric), shapes[:1], 2)
        for metric in ("energy", "steps")
    )
    assert steps - energy == pytest.approx(4 * (64 + 64) / EVERY)  # rows and columns
