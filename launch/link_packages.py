"""Links what an installed package requires, and nothing else, from this environment into another's site-packages.

    python link_packages.py FOLDER PACKAGE [LEFT_OUT ...]      FOLDER has PACKAGE already

So an environment has just what ``pip install PACKAGE`` would bring, without a download; LEFT_OUT is not linked.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(package: Distribution, left_out: set[str]) -> dict[str, Distribution]:
    """The distributions that one requires, directly or not, by their names."""
    found: dict[str, Distribution] = {}
    waiting: list[tuple[Distribution, frozenset[str]]] = [(package, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asked, extras = waiting.pop()
        for requirement in map(Requirement, asked.requires or ()):
            name = canonicalize_name(requirement.name)
            wanted = not requirement.marker or any(requirement.marker.evaluate({"extra": e}) for e in {"", *extras})
            entry = name, frozenset(requirement.extras)
            if wanted and name not in left_out and entry not in seen:
                seen.add(entry)
                found[name] = distribution(name)
                waiting.append((found[name], entry[1]))
    return found


def link(package: Distribution, folder: Path) -> None:
    """Link the files of a distribution: its folders and modules at the top, of which some are several's."""
    for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(str(package.locate_file(top)))


def main(folder: str, package: str, *left_out: str) -> None:
    """Link what the package requires."""
    (root,) = distributions(name=package, path=[folder])
    found = required(root, set(left_out))
    for each in found.values():
        link(each, Path(folder))
    print(f"linked {', '.join(sorted(found))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
