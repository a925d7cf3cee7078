"""The package's description: README.md with links that also lead somewhere on a package index.

pyproject.toml has everything else. Links into the repository begin with `Repository` of its
[project.urls]. Without that address their texts are left, and no pictures.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def description(readme: str, repository: str | None, version: str) -> str:
    """Return the README with absolute links, to the files of this version's tag."""

    def absolute(link: re.Match[str]) -> str:
        mark, text, path = link.groups()
        if repository is None:
            return "" if mark else text
        kind = "raw" if mark else "blob"
        return f"{mark}[{text}]({repository.rstrip('/')}/{kind}/v{version}/{path})"

    return RELATIVE.sub(absolute, readme)


def main() -> None:
    """Run setuptools."""
    from setuptools import setup

    project, package, readme = (
        ROOT.joinpath(name).read_text(encoding="utf-8")
        for name in ("pyproject.toml", "ds_ckpt/__init__.py", "README.md")
    )
    address = re.search(r'^Repository *= *"(.+)"', project, re.M)
    version = re.search(r'^__version__ = "(.+)"', package, re.M)
    assert version is not None
    text = description(readme, address and address[1], version[1])
    setup(long_description=text, long_description_content_type="text/markdown")


if __name__ == "__main__":  # as every build runs it
    main()
