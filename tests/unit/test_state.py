"""Saved residuals: the same processes to the bit, other worlds and hosts the same sum, refusals."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_ckpt.compression import Feedback
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.errors import StateError
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.exchange.state import ResidualFiles

NUMELS = {"tiny": 3, "layers.0.weight": 700, "layers/odd name": 129}
DTYPES: tuple[ResidualDtype, ...] = ("fp32", "bf16", "int8")


class Part:
    """State that is not residuals."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.state = dict(state or {})

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def test_a_checkpoint_of_plain_deepspeed_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes = Processes(2)
    with caplog.at_level(logging.INFO, logger="ds_ckpt"):
        for files in processes.files:
            files.restore(files.read(tmp_path))
    said = [record.getMessage() for record in caplog.records]
    assert any("holds no residuals" in line and "start at 0" in line for line in said)
    assert not any(feedback.state_dict() for feedback in processes.feedbacks)


class Processes:
    """`hosts` times `local` processes with residuals, each keeping its column."""

    def __init__(
        self,
        hosts: int,
        local: int = 1,
        dtype: ResidualDtype = "fp32",
        *,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        self.world = hosts * local
        columns = [tuple(range(i, self.world, local)) for i in range(local)]
        self.members = [columns[p % local] for p in range(self.world)]
        self.feedbacks = [Feedback(enabled=enabled, dtype=dtype, seed=p) for p in range(self.world)]
        self.parts = [Part() for _ in range(self.world)]
        self.files = [
            ResidualFiles(
                self.feedbacks[p],
                **{"method": "topk", "numels": NUMELS, "parts": {"some": self.parts[p]}, **options},
                dp_rank=p,
                world=self.world,
                members=self.members[p] if local > 1 else None,
            )
            for p in range(self.world)
        ]

    def column(self, process: int, name: str) -> LocalShard:
        return LocalShard(ShardLayout(NUMELS[name], self.world), self.members[process])

    def train(self, steps: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            for p, feedback in enumerate(self.feedbacks):
                for name in NUMELS:
                    numel = self.column(p, name).numel
                    gradient = torch.randn(numel, generator=generator)
                    pending = feedback.accumulate(name, gradient, self.world)
                    pending[: numel // 3] = 0.0
                    feedback.store(name, pending)
                feedback.commit()

    def save(self, folder: Path) -> None:
        self.files[0].begin(folder)
        for p, files in enumerate(self.files):
            self.parts[p].state = {"factor": torch.full((2, 3), float(p)), "gate": [p, "dense"]}
            files.save(folder)
        self.files[0].end(folder)

    def load(self, folder: Path) -> None:
        states = [files.read(folder) for files in self.files]
        for files, state in zip(self.files, states, strict=True):
            files.restore(state)

    def sums(self) -> dict[str, Tensor]:
        """Of every entry over all processes, float64."""
        totals = {name: torch.zeros(n, dtype=torch.float64) for name, n in NUMELS.items()}
        for p, feedback in enumerate(self.feedbacks):
            for name, residual in feedback.state_dict().items():
                layout = self.column(p, name)
                for m in range(len(layout.members)):
                    totals[name][layout.source(m)] += residual[layout.shard(m)].double()
        return totals

    def bits(self) -> list[Any]:
        return [
            {n: [t.view(torch.uint8).tolist() for t in s.tensors] for n, s in f.stored().items()}
            for f in self.feedbacks
        ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hosts", "local"), [(1, 1), (3, 1), (2, 2), (3, 2), (1, 4)])
def test_the_same_places_go_on_to_the_bit(
    tmp_path: Path, dtype: ResidualDtype, hosts: int, local: int
) -> None:
    first = Processes(hosts, local, dtype)
    first.train(3)
    first.save(tmp_path)
    resumed = Processes(hosts, local, dtype)
    resumed.train(2, seed=5)
    resumed.load(tmp_path)
    assert resumed.bits() == first.bits()
    for p, part in enumerate(resumed.parts):
        assert part.state.keys() == {"factor", "gate"}
        assert torch.equal(part.state["factor"], torch.full((2, 3), float(p)))
        assert part.state["gate"] == [p, "dense"]
    for processes in (first, resumed):
        processes.train(2, seed=9)
    assert resumed.bits() == first.bits()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
)
def test_other_worlds_and_hosts_keep_the_sum_of_every_entry(
    tmp_path: Path,
    saved: ResidualDtype,
    dtype: ResidualDtype,
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    old, new = Processes(*before, saved), Processes(*after, dtype)
    old.train(2)
    old.save(tmp_path)
    new.load(tmp_path)
    for (name, expected), got in zip(old.sums().items(), new.sums().values(), strict=True):
        largest = sum(float(f.state_dict()[name].abs().sum()) for f in old.feedbacks)
        assert float((got - expected).abs().max()) <= 1e-6 * largest / NUMELS[name]
    for p, feedback in enumerate(new.feedbacks):
        assert {n: r.numel() for n, r in feedback.state_dict().items()} == {
            n: new.column(p, n).numel for n in NUMELS
        }
    factors = [part.state["factor"] for part in new.parts]
    if before != after:  # members of a column must agree, and do
        assert all(torch.equal(f, factors[0]) for f in factors)
    new.train(1)
    assert all(
        s.values.dtype != torch.float32 for f in new.feedbacks for s in f.stored().values()
    ) == (dtype != "fp32")


def test_the_file_holds_what_is_kept(tmp_path: Path) -> None:
    processes = Processes(1, dtype="int8")
    processes.train(1)
    processes.save(tmp_path)
    (path,) = tmp_path.iterdir()
    tensors = load_file(path)
    assert tensors["residual/layers/odd name"].dtype == torch.int8
    assert tensors["scales/layers/odd name"].dtype == torch.bfloat16
    assert tensors["scales/layers/odd name"].shape == (math.ceil(129 / 64),)
    assert path.stat().st_size < sum(NUMELS.values()) * 1.05 + 1500


def test_without_error_feedback_residuals_drop_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, without = Processes(2), Processes(2, enabled=False)
    saved.train(1)
    saved.save(tmp_path)
    without.load(tmp_path)
    assert [f.nbytes for f in without.feedbacks] == [0, 0]
    (record,) = caplog.records
    assert "without error feedback they drop" in record.getMessage()
    assert torch.equal(without.parts[1].state["factor"], torch.ones(2, 3))


def test_an_earlier_save_of_another_world_is_cleared(tmp_path: Path) -> None:
    broken_off = tmp_path / "ds_ckpt_residuals_00002_of_00003.unfinished"
    broken_off.write_bytes(b"half a fi")
    for world in (3, 2):
        processes = Processes(world)
        processes.train(1)
        processes.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    Processes(2).load(tmp_path)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_second_save_that_was_broken_off_is_refused(tmp_path: Path, written: int) -> None:
    """DeepSpeed's files of the first save are still there; residuals of 0 would not be theirs."""
    processes = Processes(2)
    processes.train(1)
    processes.save(tmp_path)
    processes.files[0].begin(tmp_path)
    for files in processes.files[:written]:
        files.save(tmp_path)
    with pytest.raises(StateError, match=r"broken off[\s\S]*ds_ckpt_residuals_\*"):
        Processes(2).load(tmp_path)
    processes.save(tmp_path)
    Processes(2).load(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("method", ["dense", "none"])
def test_a_run_without_residuals_does_not_drop_those_of_another_method_unawares(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    saved = Processes(2)
    saved.train(1)
    saved.save(tmp_path)
    files = ResidualFiles(None, method=method, numels=NUMELS, dp_rank=0, world=2)
    assert saved.files[0].keeps
    assert not files.keeps
    if method == "dense":
        with pytest.raises(StateError, match=r"method topk[\s\S]*remove the ds_ckpt_residuals_"):
            files.read(tmp_path)
        return
    assert files.read(tmp_path) is None  # as DeepSpeed alone would
    assert "holds residuals; method none drops them" in caplog.text


def test_dense_goes_on_from_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was saved with micro-steps that wait owes nothing but for absent parameters."""
    held = Processes(2, method="dense")
    held.save(tmp_path)
    files = ResidualFiles(None, method="dense", numels=NUMELS, dp_rank=0, world=2)
    assert files.read(tmp_path) is None
    assert "drops" not in caplog.text
    held.train(1)
    held.save(tmp_path)
    assert files.read(tmp_path) is None
    assert "method dense drops them" in caplog.text


def test_a_first_save_leaves_no_mark(tmp_path: Path) -> None:
    processes = Processes(2)
    processes.files[0].begin(tmp_path / "tag")
    assert not (tmp_path / "tag").exists()
    processes.files[0].end(tmp_path / "tag")
    Processes(2).load(tmp_path / "tag")


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    saved = Processes(2, 2)
    saved.train(1)
    saved.save(tmp_path)
    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"method": "quantize"}, ["method topk", "method quantize", "compression.method"]),
        (
            {"numels": {**NUMELS, "layers.0.weight": 704}},
            ["layers.0.weight", "has 704 elements, 352 of them in this process's local shard"],
        ),
        ({"numels": {"tiny": 3}}, ["layers/odd name", "no trainable parameter"]),
    ]
    for options, words in refused:
        for hosts, local in ((2, 2), (3, 1)):
            processes = Processes(hosts, local, **options)
            with pytest.raises(StateError) as caught:
                processes.load(tmp_path)
            assert all(word in str(caught.value) for word in words)
            assert all(not f.stored() for f in processes.feedbacks)
    one = sorted(tmp_path.iterdir())[1]
    content = one.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content[:-1]):
        one.write_bytes(damaged)
        with pytest.raises(StateError, match=r"00001_of_00004.*cannot be read"):
            Processes(4).load(tmp_path)
    one.unlink()
    with pytest.raises(StateError, match=r"without ds_ckpt_residuals_00001_of_00004"):
        Processes(2).load(tmp_path)


@pytest.mark.parametrize("other", ["1", "3"])
def test_another_format_is_refused(tmp_path: Path, other: str) -> None:
    path = tmp_path / "ds_ckpt_residuals_00000_of_00001.safetensors"
    save_file({"residual/tiny": torch.zeros(3)}, path, {"format": other, "method": "topk"})
    with pytest.raises(
        StateError, match=rf"format {other}[\s\S]*format 2[\s\S]*remove the ds_ckpt"
    ):
        Processes(1).load(tmp_path)
