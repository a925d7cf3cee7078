"""Common training libraries, compared bit by bit with the same run without ds_ckpt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_ecosystem as cases

SLOW = pytest.mark.slow
LORA = ["lora", "lora-ready"]
_SAME = ("losses", "gradients", "evaluated", "written", "lengths", "weights", "buffers")


def _compare(plain: dict[str, Any], ours: dict[str, Any], plan: str) -> None:
    for key in _SAME:
        assert plain.get(key) == ours.get(key), key
    assert len(set(plain["losses"])) == len(plain["losses"]), "the weights have not moved"
    assert plain["blocks"] == plain["moved"] == 0
    assert ours["blocks"] >= 3
    assert (ours["moved"] > 0) == ("offload" in plan)
    # LLaVA leaves the last layers of its eyes out of the loss: nothing of them comes back
    assert ours["moved"] // 2 <= ours["back"] <= ours["moved"]


@pytest.mark.parametrize(
    ("names", "plan"),
    [
        (["experts", "lora"], "selective, offload"),
        *(
            pytest.param(names, plan, marks=SLOW)
            for names in (["resnet", "llava", "nn.Transformer"], ["bart", "experts"], LORA)
            for plan in ("selective, offload", "block")
        ),
    ],
    ids=str,
)
def test_training_is_what_it_is_without(world2: Any, names: list[str], plan: str) -> None:
    """Losses, gradients, weights and buffers of three steps, for policies with and without offload.

    BatchNorm's statistics are buffers; with experts, the two processes run other ones.
    """
    for results in world2.run(cases.train, names, ["stock", plan], timeout=280):
        for name in names:
            _compare(results[f"{name}: stock"], results[f"{name}: {plan}"], plan)


def test_generation_and_evaluation_between_steps(world2: Any) -> None:
    plan = "selective, offload"
    plain = world2.run(cases.generate_between_steps, "stock")
    ours = world2.run(cases.generate_between_steps, plan)
    for without, with_us in zip(plain, ours, strict=True):
        _compare(without, with_us, plan)
        assert with_us["lengths"] == [11] * 3  # the evaluation has filled its cache
    assert len(ours[0]["written"][0][0]) < len(ours[1]["written"][0][0])


def test_checkpointing_that_is_switched_off_around_generation(world2: Any) -> None:
    """In training mode, with arguments that are not the policy's."""
    plain = world2.run(cases.generate_in_training_mode, "stock")
    ours = world2.run(cases.generate_in_training_mode, "block")
    for without, with_us in zip(plain, ours, strict=True):
        _compare(without, with_us, "block")


@pytest.mark.parametrize(
    ("plans", "way"),
    [
        (("block", "stock"), "keep"),
        pytest.param(("block, dense", "block, offload"), "keep", marks=SLOW),
        pytest.param(("block, dense", "block, dense"), "drop", marks=SLOW),
    ],
)
def test_a_second_engine_takes_the_model_over(
    world2: Any, plans: tuple[str, str], way: str
) -> None:
    stock = world2.run(cases.second_engine, ("stock", "stock"), "destroy")
    for rank, (without, with_us) in enumerate(
        zip(stock, world2.run(cases.second_engine, plans, way), strict=True)
    ):
        for key in ("losses", "evaluated", "weights"):
            assert with_us[key] == without[key], key
        assert with_us["forwards"] == without["forwards"] + (plans[1] != "stock")
        assert with_us["patched"] == without["patched"] == 0
        assert ("a later engine trains" in with_us["refused"]) == (way == "keep")
        assert with_us["ended"] == (rank == 0)  # something refers to a dropped engine, too


@pytest.mark.parametrize(
    ("plan", "flags"),
    [
        pytest.param(
            "block",
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"use_reentrant": True},
            },
            marks=SLOW,
        ),
        ("block, offload", {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_trainer_with_evaluation_accumulation_and_resume(
    world2: Any, tmp_path: Path, plan: str, flags: dict[str, Any]
) -> None:
    plain = world2.run(cases.trainer, str(tmp_path / "plain"), "stock", False)
    ours = world2.run(cases.trainer, str(tmp_path / "ours"), plan, False, **flags)
    again = world2.run(cases.trainer, str(tmp_path / "ours"), plan, True, **flags)
    for without, with_us, resumed in zip(plain, ours, again, strict=True):
        assert len(with_us["losses"]) == len(with_us["evaluated"]) == 4
        _compare(without, with_us, plan)
        _compare(without, resumed, plan)


@SLOW
def test_two_trainers_train_one_model(world2: Any, tmp_path: Path) -> None:
    plain = world2.run(cases.two_trainers, str(tmp_path / "plain"), "stock")
    ours = world2.run(
        cases.two_trainers, str(tmp_path / "ours"), "block", gradient_checkpointing=True
    )
    for both, both_with_us in zip(plain, ours, strict=True):
        for without, with_us in zip(both, both_with_us, strict=True):
            _compare(without, with_us, "block")


def test_trainer_with_compression_and_resume(world2: Any, tmp_path: Path) -> None:
    plan = "block, lead"
    plain = world2.run(cases.trainer, str(tmp_path / "plain"), "stock", False)
    ours = world2.run(cases.trainer, str(tmp_path / "ours"), plan, False)
    again = world2.run(cases.trainer, str(tmp_path / "ours"), plan, True)
    for without, with_us, resumed in zip(plain, ours, again, strict=True):
        assert "Top-K" in with_us["summary"]
        assert "momentum correction" in with_us["summary"]
        assert "one exchange per accumulated step" in with_us["summary"]
        assert with_us["losses"][0] == without["losses"][0]
        assert with_us["losses"] != without["losses"]
        gaps = [abs(a - b) for a, b in zip(with_us["losses"], without["losses"], strict=True)]
        assert max(gaps) < 0.1
        assert resumed["losses"] == with_us["losses"]
        assert resumed["weights"] == with_us["weights"]


def test_accelerate_with_accumulation_and_resume(world2: Any, tmp_path: Path) -> None:
    plan = "block, offload"
    plain = world2.run(cases.accelerate, str(tmp_path / "plain"), "stock")
    ours = world2.run(cases.accelerate, str(tmp_path / "ours"), plan)
    for without, with_us in zip(plain, ours, strict=True):
        for key in ("losses", "evaluated", "weights"):
            assert without[key] == with_us[key], key
        assert with_us["losses"][4:8] == with_us["losses"][8:]
        assert with_us["losses"][:4] != with_us["losses"][4:8]
        assert with_us["blocks"] == 3
        assert with_us["moved"] > 0
