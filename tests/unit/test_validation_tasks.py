"""Tasks and data: the default sets, a user's files, checkpoints and data sets by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.lab.validate import data, task
from ds_ckpt.lab.validate.data import Examples, has_labels, read_labelled, read_text
from ds_ckpt.lab.validate.task import (
    Learner,
    TaskSpec,
    classifier,
    make_spec,
    open_task,
    pretrained_llama,
    vit,
)

pytest.importorskip("transformers")


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def labelled(path: Path, count: int = 60) -> str:
    words = {"up": "high above the sky", "down": "low under the ground"}
    rows = [
        {"text": f"{words[label]} {i}", "label": label} for i in range(count) for label in words
    ]
    return lines(path, rows)


def characters(text: str) -> list[int]:
    return list(text.encode())


def texts(side: dict[str, torch.Tensor]) -> list[str]:
    kept = zip(side["input_ids"], side["attention_mask"], strict=True)
    return [bytes(ids[mask.bool()].tolist()).decode() for ids, mask in kept]


# the default sets


def test_topics_are_small_balanced_and_apart() -> None:
    found = data.topics()
    assert found.classes == data.FAMILIES
    for side, most in zip((found.train, found.heldout), data.PER_FAMILY, strict=True):
        counts = side["labels"].bincount()
        assert len(counts) == found.classes
        assert int(counts.max()) <= most
        assert int(counts.min()) > most // 3
        assert side["input_ids"].shape == (len(side["labels"]), data.PASSAGE)
        assert 1 <= int(side["input_ids"].min()) <= int(side["input_ids"].max()) < data.WORDS
    ours, theirs = ({tuple(row.tolist()) for row in s["input_ids"]} for s in (
        found.train, found.heldout))  # fmt: skip
    assert len(ours & theirs) < 0.02 * len(theirs)  # texts that stand twice in the library
    again = data.topics()
    assert torch.equal(found.train["input_ids"], again.train["input_ids"])


def test_digits_need_scikit_learn_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UnsupportedError, match=r"ds_ckpt\[validation\]"):
        data.digits()


def test_digits_go_through_the_vit() -> None:
    pytest.importorskip("sklearn")
    found = data.digits()
    assert found.sizes == (997, 800)
    assert float(found.train["pixel_values"].min()) >= 0
    assert float(found.train["pixel_values"].max()) == 1.0
    learner = Learner(found, vit, batch=4)
    assert learner.loss(0, 0, 0).item() == pytest.approx(2.3, abs=0.3)
    score = learner.evaluate()
    assert score.accuracy is not None
    assert 0.02 < score.accuracy < 0.25


def test_classifiers_start_from_one_pretrained_model(tmp_path: Path) -> None:
    found = data.topics()
    build = classifier(found.classes, begun=lambda: pretrained_llama(tmp_path, found, 3))
    a, b = build(1).state_dict(), build(2).state_dict()
    assert len(list(tmp_path.glob("pretrained-3-*.pt"))) == 1
    same = [name for name in a if torch.equal(a[name], b[name])]
    assert [name for name in a if name not in same] == ["score.weight"]
    again = pretrained_llama(tmp_path / "other", found, 3)
    assert all(torch.equal(a[f"model.{name}"], weight) for name, weight in again.items())


def test_a_pretrained_model_is_of_its_own_text(tmp_path: Path) -> None:
    found = data.topics()
    rows = {name: values[:100] for name, values in found.train.items()}
    other = Examples(rows, found.heldout, found.classes, "another text")
    a, b = (pretrained_llama(tmp_path, e, 3) for e in (found, other))
    assert any(not torch.equal(a[name], b[name]) for name in a)


# drawing


def toy(count: int = 10) -> Examples:
    rows = {"x": torch.arange(count), "labels": torch.arange(count)}
    return Examples(rows, rows, count, "toy")


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


def test_an_epoch_has_every_example_once_dealt_out_to_the_workers() -> None:
    learner = Learner(toy(), lambda _: Toy(), workers=2, batch=5)
    epochs = []
    for seed in (0, 1):
        learner.begin(seed)
        for step in range(2):
            drawn = [learner.inputs(step, 0, worker)["x"] for worker in range(2)]
            epochs.append(torch.cat(drawn).tolist())
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    learner.begin(0)
    again = torch.cat([learner.inputs(1, 0, worker)["x"] for worker in range(2)]).tolist()
    assert again == epochs[1]


# a user's data


def test_text_with_blank_lines_of_spaces_is_cut_there(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("".join(f" paragraph {i} " + "word " * 200 + "\n \n" for i in range(80)))
    corpus = read_text(str(path))
    assert 0.05 < len(corpus.heldout) / len(corpus.train) < 0.2
    assert corpus.source == "t.txt"
    assert read_text(str(path)).sha256 == corpus.sha256


def test_json_lines_are_texts_and_examples(tmp_path: Path) -> None:
    source = labelled(tmp_path / "d.jsonl")
    assert has_labels(source)
    found = read_labelled(source, characters, 64)
    assert found.classes == 2
    assert sum(found.sizes) == 120
    train, heldout = texts(found.train), texts(found.heldout)
    assert not set(train) & set(heldout)
    labels = zip(train, found.train["labels"].tolist(), strict=True)
    assert {label for text, label in labels if "sky" in text} == {1}
    corpus = read_text(source)
    assert b"low under the ground 7" in corpus.train + corpus.heldout
    plain = lines(tmp_path / "p.jsonl", [{"text": "x"}])
    assert not has_labels(plain)
    assert not has_labels(str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", ":1"),
        ('{"label": 1}', "named? text|text"),
        ("[1, 2]", "no JSON object"),
        ('{"text": "a", "label": 1}', "two classes"),
        ('{"text": "a"}', "no label"),
    ],
)
def test_wrong_examples_are_named_by_their_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(ConfigError, match=words):
        read_labelled(str(path), characters, 8)


def test_json_lines_are_utf_8_and_end_at_line_feeds(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    rows = [{"text": f"one\u2028line {i}", "label": i % 2} for i in range(60)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows))
    assert sum(read_labelled(str(path), characters, 8).sizes) == 60
    path.write_bytes(b'{"text": "caf\xe9", "label": 1}\n')
    with pytest.raises(ConfigError, match=r"d\.jsonl.*\n.*UTF-8"):
        read_labelled(str(path), characters, 8)


def test_sequences_longer_than_what_is_held_out_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join("words " * 500 for _ in range(40)))  # about 12 kB are held out
    with pytest.raises(ConfigError, match="shorter --length"):
        open_task(make_spec("language", data=str(text), length=16_000), tmp_path)


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("short")
    with pytest.raises(ConfigError, match="20 of about 2 kB"):
        read_text(str(path))


def test_a_name_without_the_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnsupportedError, match="pip install datasets"):
        read_text("someone/something")


class Datasets(ModuleType):
    """Stands in for the package."""

    def __init__(self, splits: dict[str, list[dict[str, Any]]]) -> None:
        super().__init__("datasets")
        self.splits = splits
        self.asked: list[tuple[str, str | None]] = []

    def load_dataset(self, name: str, configuration: str | None) -> Any:
        self.asked.append((name, configuration))
        if name == "missing":
            raise FileNotFoundError("no such data set")
        return self.splits


def test_data_sets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"sentence": f"s {i}", "label": i % 2} for i in range(6)]
    module = Datasets({"train": rows, "validation": rows[:3]})
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = read_labelled("owner/name:part", characters, 8)
    assert module.asked == [("owner/name", "part")]
    assert (*found.sizes, found.classes) == (6, 3, 2)
    assert b"s 5" in read_text("owner/name").train
    with pytest.raises(ConfigError, match="no such data set"):
        read_text("missing")
    del module.splits["validation"]
    with pytest.raises(ConfigError, match="it has the splits train"):
        read_text("owner/name")


# checkpoints


def save_checkpoint(folder: Path) -> None:
    """A tiny Llama with a tokenizer of words, as `save_pretrained` leaves them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "sky": 1, "ground": 2, "word": 3}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_a_checkpoint_is_tuned_on_texts_and_on_examples(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model")
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join("sky ground word " * 60 + str(i) for i in range(80)))
    spec = make_spec("language", data=str(text), model=str(tmp_path / "model"), batch=2, length=8)
    assert spec.learning_rate == 5e-5
    task = open_task(spec, tmp_path)
    first = task.learner.initial(0).state_dict()
    again = task.learner.initial(1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert task.learner.inputs(0, 0, 0)["input_ids"].max() <= 3
    assert torch.isfinite(task.learner.loss(0, 0, 0))

    source = labelled(tmp_path / "d.jsonl")
    spec = make_spec("labelled", data=source, model=str(tmp_path / "model"), batch=4, length=8)
    task = open_task(spec, tmp_path)
    inputs = task.learner.inputs(0, 0, 1)
    assert inputs["input_ids"].shape == (4, 8)
    assert inputs["attention_mask"].sum() < 32
    heads = [task.learner.initial(seed).score.weight for seed in (0, 1, 0)]  # type: ignore[union-attr]
    assert not torch.equal(heads[0], heads[1])  # type: ignore[arg-type]
    assert torch.equal(heads[0], heads[2])  # type: ignore[arg-type]
    assert torch.isfinite(task.learner.loss(0, 0, 0))


def test_a_checkpoint_that_is_not_there_is_told(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join("words " * 500 for _ in range(40)))
    spec = make_spec("language", data=str(text), model=str(tmp_path / "nothing"))
    with pytest.raises(UnsupportedError, match="--model"):
        open_task(spec, tmp_path)


def test_own_examples_without_a_checkpoint(tmp_path: Path) -> None:
    source = labelled(tmp_path / "d.jsonl")
    task = open_task(TaskSpec("labelled", data=source, batch=4, length=8), tmp_path)
    assert torch.isfinite(task.learner.loss(0, 0, 0))
    assert task.learner.evaluate().accuracy is not None
    with pytest.raises(ConfigError, match="add --data"):
        open_task(TaskSpec("labelled"), tmp_path)


def test_the_same_sizes_and_data_are_the_same_task(tmp_path: Path) -> None:
    source = labelled(tmp_path / "d.jsonl")
    one = open_task(TaskSpec("labelled", data=source, length=8), tmp_path).digest
    assert open_task(TaskSpec("labelled", data=source, length=8), tmp_path).digest == one
    assert open_task(TaskSpec("labelled", data=source, length=9), tmp_path).digest != one
    elsewhere = labelled(tmp_path / "moved.jsonl")
    assert open_task(TaskSpec("labelled", data=elsewhere, length=8), tmp_path).digest == one
    labelled(tmp_path / "d.jsonl", 70)
    assert open_task(TaskSpec("labelled", data=source, length=8), tmp_path).digest != one


def test_runs_on_record_are_of_these_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy" / "results.jsonl"
    lines = map(json.loads, results.read_text().splitlines())
    recorded = {(line["names"][0], line["key"]["task"]) for line in lines}
    # of Python 3.11.7, whose own text it is
    sha256 = "f10e6f3cfd3e9aa4633c7cfd90bbec454e34262848da2dc7abf6eb509fa7d4eb"
    corpus = SimpleNamespace(train=b"x" * 99, heldout=b"x" * 99, source="", sha256=sha256)
    monkeypatch.setattr(task.workload, "embedded_corpus", lambda: corpus)
    for kind in ("digits", "language"):
        assert (kind, open_task(make_spec(kind, world=4), tmp_path).digest) in recorded


def test_another_device_is_another_task(tmp_path: Path) -> None:
    spec = TaskSpec("labelled", data=labelled(tmp_path / "d.jsonl"), length=8)
    assert open_task(spec, tmp_path).digest != open_task(spec, tmp_path, device="cpu:0").digest


def test_a_checkpoint_that_was_trained_on_is_another_task(tmp_path: Path) -> None:
    source, model = labelled(tmp_path / "d.jsonl"), tmp_path / "model"
    save_checkpoint(model)
    spec = make_spec("labelled", data=source, model=str(model), length=8)
    before = open_task(spec, tmp_path).digest
    assert open_task(spec, tmp_path).digest == before
    transformers = pytest.importorskip("transformers")
    trained = transformers.LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        trained.model.norm.weight.add_(1)
    trained.save_pretrained(model)
    assert open_task(spec, tmp_path).digest != before


def test_runs_of_one_seed_drop_out_the_same(tmp_path: Path) -> None:
    class Dropping(Toy):
        def forward(self, x: torch.Tensor, **_: Any) -> Any:
            kept = torch.nn.functional.dropout(self.weight + torch.ones(64), 0.5, self.training)
            return SimpleNamespace(loss=(kept * torch.arange(64)).sum())

    learner = Learner(toy(), lambda _: Dropping(), workers=2, batch=2)
    places = [(0, 0, 0), (0, 0, 1), (1, 0, 0)]

    def losses(seed: int) -> list[float]:
        learner.begin(seed)
        return [learner.loss(*place).item() for place in places]

    first, other = losses(1), losses(2)
    assert losses(1) == first
    assert len({*first, *other}) == 6
    learner.begin(1)
    assert learner.loss(*places[2]).item() == first[2]  # resumed there
