"""Saved residuals: the same processes to the bit, other worlds and hosts the same sum, refusals."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from virtual import World

from ds_ckpt.compression import Feedback
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.engine.step import StepState
from ds_ckpt.errors import StateError
from ds_ckpt.exchange.state import ResidualFiles
from ds_ckpt.sealed import SealedFile, write

NUMELS = {"tiny": 3, "layers.0.weight": 700, "layers/odd name": 129}
DTYPES: tuple[ResidualDtype, ...] = ("fp32", "bf16", "int8")


class Part:
    """State that is not residuals."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.state = dict(state or {})

    def state_dict(self) -> dict[str, Any]:
        return {"some": self.state}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self.state = dict(state.get("some", {}))


class Processes:
    """`hosts` times `local` processes with residuals, each keeping its column."""

    def __init__(self, hosts: int, local=1, dtype="fp32", **options: Any) -> None:
        size = hosts * local
        self.world = World(size, lambda name, shape: None, local=local, residual_dtype=dtype)
        self.feedbacks = self.world.feedbacks
        self.parts = [Part() for _ in range(size)]
        self.files = [
            ResidualFiles(
                self.feedbacks[p],
                **{"method": "topk", "numels": NUMELS, "step": self.parts[p], **options},
                dp_rank=p,
                world=size,
                peers=self.world.columns if local > 1 else (),
            )
            for p in range(size)
        ]

    def train(self, steps: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            for p, feedback in enumerate(self.feedbacks):
                for name, whole in NUMELS.items():
                    numel = self.world.column(p, whole).numel
                    gradient = torch.randn(numel, generator=generator)
                    pending = feedback.accumulate(name, gradient, len(self.feedbacks))
                    pending[: numel // 3] = 0.0
                    feedback.store(name, pending)
                feedback.commit()

    def save(self, folder: Path) -> None:
        self.files[0].clear(folder)
        for p, files in enumerate(self.files):
            self.parts[p].state = {"factor": torch.full((2, 3), float(p)), "gate": [p, "dense"]}
            files.save(folder)

    def load(self, folder: Path) -> None:
        states = [files.read(folder) for files in self.files]
        for files, state in zip(self.files, states, strict=True):
            files.restore(state)

    def sums(self) -> dict[str, Tensor]:
        return {name: self.world.residual_sum(name, numel) for name, numel in NUMELS.items()}

    def bits(self) -> list[Any]:
        return [
            {n: [t.view(torch.uint8).tolist() for t in s.tensors] for n, s in f.stored().items()}
            for f in self.feedbacks
        ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hosts", "local"), [(1, 1), (3, 1), (2, 2), (3, 2), (1, 4)])
def test_the_same_places_go_on_to_the_bit(tmp_path, dtype, hosts, local) -> None:
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
)
def test_another_one_level_world_keeps_the_sum_and_two_levels_start_at_zero(
    tmp_path, saved, dtype, before, after
) -> None:
    old, new = Processes(*before, saved), Processes(*after, dtype)
    old.train(2)
    old.save(tmp_path)
    new.load(tmp_path)
    is_one_level = all(local == 1 or nodes == 1 for nodes, local in (before, after))
    is_kept = before == after or (before[1] == after[1] == 1)
    for (name, expected), got in zip(old.sums().items(), new.sums().values(), strict=True):
        if is_kept:
            largest = sum(float(f.state_dict()[name].abs().sum()) for f in old.feedbacks)
            assert float((got - expected).abs().max()) <= 1e-6 * largest / NUMELS[name]
        elif not is_one_level:
            assert not got.any()
    factors = [part.state["factor"] for part in new.parts]
    if before != after:
        assert all(torch.equal(f, factors[0]) for f in factors)
    new.train(1)
    for feedback in new.feedbacks:
        for stored in feedback.stored().values():
            assert (stored.values.dtype == torch.float32) == (dtype == "fp32")


@pytest.mark.parametrize("method", ["dense", "none"])
def test_a_run_without_residuals_does_not_drop_those_of_another_method_unawares(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    saved = Processes(2)
    saved.train(1)
    saved.save(tmp_path)
    files = ResidualFiles(None, method=method, numels=NUMELS, dp_rank=0, world=2)
    if method == "dense":
        with pytest.raises(StateError, match=r"method topk[\s\S]*remove the ds_ckpt_residuals_"):
            files.read(tmp_path)
        return
    assert files.read(tmp_path) is None  # as DeepSpeed alone would
    assert "holds residuals; method none drops them" in caplog.text


def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    saved = Processes(2, 2)
    saved.train(1)
    saved.save(tmp_path)
    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"method": "quantize"}, ["method topk", "method quantize", "compression.method"]),
        (
            {"numels": {**NUMELS, "layers.0.weight": 704}},
            ["layers.0.weight", "has 352 trainable elements"],
        ),
        ({"numels": {"tiny": 3}}, ["layers.0.weight", "has 0 trainable elements"]),
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


def test_slices_of_tensor_parallel_ranks_have_their_own_files(tmp_path: Path) -> None:
    slices = [Processes(2, model_slice=f"mp0{part}of02") for part in range(2)]
    for seed, saved in enumerate(slices):
        saved.train(2, seed)
        for files in saved.files:
            files.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    for saved in slices:
        resumed = Processes(2, model_slice=saved.files[0].model_slice)
        resumed.load(tmp_path)
        assert resumed.bits() == saved.bits()
    for part, words in (("", "whole tensors"), ("mp00of04", "holds mp00of04")):
        with pytest.raises(StateError, match=f"mp00of02, mp01of02[\\s\\S]*{words}"):
            Processes(2, model_slice=part).load(tmp_path)
    slices[0].files[0].clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


EARLIER = Path(__file__).parent / "golden" / "earlier_release"


@pytest.mark.parametrize("method", ["topk", "powersgd", "quantize"])
def test_the_state_of_an_earlier_release_loads_to_the_bit(method: str) -> None:
    """Files of 2 ranks; the digests are those of its own `session.residuals`."""
    for rank, digests in enumerate(json.loads((EARLIER / "digests.json").read_text())[method]):
        exchange, feedback = World(2, lambda name, shape: None).exchanges[rank], Feedback()
        state = StepState(exchange, warmup_steps=0, current_step=lambda: 3)
        about: Any = {"method": method, "numels": dict.fromkeys(digests, 384), "step": state}
        files = ResidualFiles(feedback, **about, dp_rank=rank, world=2)
        files.restore(files.read(EARLIER / method))
        found = {n: r.numpy().tobytes() for n, r in feedback.state_dict().items()}
        assert {n: sha256(r).hexdigest()[:16] for n, r in found.items()} == digests
        saved = load_file(sorted((EARLIER / method).iterdir())[rank])
        factors = {f"factors/{key}": f for key, f in exchange.factors.state_dict().items()}
        assert factors.keys() == {key for key in saved if key.startswith("factors/")}
        assert all(torch.equal(factor, saved[key]) for key, factor in factors.items())


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds_ckpt_residuals_00000_of_00001.safetensors"
    write(path, {"residual/tiny": torch.zeros(3)}, {"format": "2", "method": "topk"})
    with pytest.raises(StateError, match=r"(?s)format 2.*format 3.*version.*remove the ds_ckpt"):
        Processes(1).load(path.parent)


Change = Callable[[dict[str, Tensor], dict[str, str]], None]


def _sealed_anew(change: Change) -> Callable[[list[Path], Random], None]:
    """Return damage by a program that writes the changed content with a valid checksum."""

    def damage(paths: list[Path], random: Random) -> None:
        path = random.choice(paths)
        file = SealedFile(path)
        tensors, metadata = {key: file.tensor(key).clone() for key in file.keys}, file.metadata
        change(tensors, metadata)
        write(path, tensors, metadata)

    return damage


def _bytes(change: Callable[[bytearray, Random], bytes]) -> Callable[[list[Path], Random], None]:
    def damage(paths: list[Path], random: Random) -> None:
        path = random.choice(paths)
        path.write_bytes(change(bytearray(path.read_bytes()), random))

    return damage


def _flip(content: bytearray, random: Random, stop: int = 0, count: int = 1) -> bytes:
    for _ in range(count):
        content[random.randrange(stop or len(content))] ^= 1 << random.randrange(8)
    return bytes(content)


def _swap(paths: list[Path], random: Random) -> None:
    one, other = random.sample(paths, 2)
    one.rename(aside := one.with_name("aside"))
    other.rename(one)
    aside.rename(other)


def _spoil(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    next(t for _, t in sorted(tensors.items()) if t.is_floating_point()).view(-1)[-1] = math.nan


def _rename_tensor(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["residual/another"] = tensors.pop("residual/tiny")


def _longer(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["residual/tiny"] = torch.cat([tensors["residual/tiny"], tensors["residual/tiny"]])


def _of_another_step(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["about"] = metadata["about"].replace('"steps": 2', '"steps": 1')


def _without_digest(paths: list[Path], random: Random) -> None:
    path = random.choice(paths)
    file = SealedFile(path)
    save_file({key: file.tensor(key) for key in file.keys}, path, file.metadata)


DAMAGES: dict[str, Callable[[list[Path], Random], None]] = {
    "none": lambda paths, random: None,
    "a byte": _bytes(_flip),
    "a byte of the header": _bytes(
        lambda content, random: _flip(content, random, 8 + int.from_bytes(content[:8], "little"))
    ),
    "64 bytes": _bytes(lambda content, random: _flip(content, random, count=64)),
    "truncated": _bytes(lambda content, random: content[: random.randrange(len(content))]),
    "more bytes": _bytes(lambda content, random: content + random.randbytes(9)),
    "not finite": _sealed_anew(_spoil),
    "swapped": _swap,
    "missing": lambda paths, random: random.choice(paths).unlink(),
    "another name": _sealed_anew(_rename_tensor),
    "another shape": _sealed_anew(_longer),
    "another step": _sealed_anew(_of_another_step),
    "digest lost": _without_digest,
}
MAY_BE_HARMLESS = {"none", "a byte", "a byte of the header", "64 bytes"}
"""A space at the end of the header, for example."""
LAYOUTS = [(2, 1), (3, 1), (2, 2)]
"""Hosts, and processes on each."""


def corrupted(folder, damage, random, dtype, before, after) -> str:
    """Save, damage, and load into a run under way: "refused", with nothing changed, or "loaded to
    the bit". Fails where it is neither."""
    shutil.rmtree(folder, ignore_errors=True)
    saved = Processes(*before, dtype)
    saved.train(2)
    saved.save(folder)
    well, ill = Processes(*after, dtype), Processes(*after, dtype)
    well.load(folder)
    ill.train(1, seed=7)
    held = ill.bits()
    DAMAGES[damage](sorted(folder.iterdir()), random)
    refusals, states = [], []
    for files in ill.files:
        try:
            states.append(files.read(folder))
        except StateError as error:
            refusals.append(str(error))
    if refusals:
        assert ill.bits() == held
        assert all("ds_ckpt_residuals_" in words and "fix:" in words for words in refusals)
        return "refused"
    for files, state in zip(ill.files, states, strict=True):
        files.restore(state)
    assert ill.bits() == well.bits()
    for one, other in zip(ill.parts, well.parts, strict=True):
        assert one.state["gate"] == other.state["gate"]
        assert torch.equal(one.state["factor"], other.state["factor"])
    return "loaded to the bit"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(DAMAGES)),
    st.randoms(use_true_random=False),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
)
def test_a_corrupted_state_is_refused_or_loaded_to_the_bit(
    tmp_path, damage, random, dtype, before, after
) -> None:
    """Never half: what a refusal leaves is what was there."""
    ended = corrupted(tmp_path / "tag", damage, random, dtype, before, after)
    assert ended == "refused" or damage in MAY_BE_HARMLESS
    assert ended != "refused" or damage != "none"
