"""Write requirements.lock: exact versions of everything that pyproject.toml asks for, as installed in this environment.

Run it with the Python of a working .venv after changing dependencies: ``.venv/bin/python scripts/lock.py``.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Exact versions of everything that strop and its tests need. Written by scripts/lock.py; don't edit.
# torch is the plain release: where the package index's build for this platform is not the wanted one (for example CUDA instead
# of CPU), point pip at an index of the wanted build with PIP_ARGS or PIP_EXTRA_INDEX_URL; the versions stay the same.
"""


def closure(roots: list[str]) -> dict[str, str]:
    """Return name to version of the requirements and of everything they need on this platform."""
    found: dict[str, str] = {}
    queue = [(Requirement(text), "") for text in roots]
    seen: set[tuple[str, str]] = set()
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            sys.exit(f"{requirement} is not installed here; install it, then lock again")
        if not requirement.specifier.contains(distribution.version.split("+")[0], prereleases=True):
            sys.exit(f"{name} {distribution.version} is installed, {requirement} is wanted")
        found[name] = distribution.version.split("+")[0]
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                queue += [(Requirement(text), wanted) for text in distribution.requires or []]
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    roots = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"] + project["build-system"]["requires"]
    lines = [f"{name}=={version}" for name, version in sorted(closure(roots).items())]
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"requirements.lock: {len(lines)} packages")


if __name__ == "__main__":
    main()
