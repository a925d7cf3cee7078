"""The pins that both scripts install with can be installed by every Python that is served."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PINS = [
    Requirement(line)
    for line in Path(__file__).parents[2].joinpath("constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_a_pin_is_for_pythons_that_its_package_serves(pin: Requirement, python: str) -> None:
    if pin.marker is not None and not pin.marker.evaluate({"python_version": python}):
        return
    try:
        installed = metadata(pin.name)
    except PackageNotFoundError:
        pytest.skip(f"{pin.name} is not installed")
    if installed["Version"].split("+")[0] not in pin.specifier:
        pytest.skip(f"{pin.name} {installed['Version']} is installed")
    assert python in SpecifierSet(installed["Requires-Python"] or "")
