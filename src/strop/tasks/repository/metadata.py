"""What a repository says about itself, read from its files without running any of them: name, version, requirements, entry points."""

from __future__ import annotations

import ast
import configparser
import email.parser
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TEST_EXTRAS = re.compile(r"(?:unit)?[-_]?(?:tests?|testing|pytest|tests?[-_]\w+)", re.IGNORECASE)
DEVELOPMENT_EXTRAS = re.compile(r"dev|develop|development|ci|all", re.IGNORECASE)
"""Read only where nothing is said about tests: they bring linters and documentation along."""
_REQUIREMENT_FILES = re.compile(r"(?:requirements?/)?[\w.-]*test[\w.-]*\.txt", re.IGNORECASE)
_DEVELOPMENT_FILES = re.compile(r"(?:requirements?/)?[\w.-]*dev[\w.-]*\.txt", re.IGNORECASE)
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[A-Za-z0-9,._ -]*\])?\s*([(<>=!~][^;@]*)?(;.*)?")
_NO_RUNNERS = frozenset(
    [
        "pytest-cov",
        "coverage",
        "codecov",
        "coveralls",
        "tox",
        "nox",
        "black",
        "flake8",
        "mypy",
        "ruff",
        "pylint",
        "isort",
        "pre-commit",
        "sphinx",
        "twine",
        "build",
        "wheel",
        "setuptools",
        "pip",
        "pytest-xdist",
        "pytest-randomly",
        "pytest-random-order",
        "pytest-sugar",
        "pytest-flake8",
        "pytest-black",
        "pytest-mypy",
        "pytest-ruff",
        "pytest-pylint",
        "pytest-checkdocs",
        "pytest-enabler",
        "pytest-cover",
        "pytest-perf",
        "pytest-codspeed",
        "pytest-travis-fold",
        "furo",
        "mkdocs",
        "bump2version",
        "pyright",
    ]
)
"""Not needed for a verdict, or they would change how a suite runs: coverage, linters, parallel and shuffling runners, documentation."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a repository declares.

    Attributes:
        name: Distribution name, ``""`` if it doesn't say.
        version: ``"0"`` where it is found out by code only.
        requires: What its code needs, as requirement strings that pip understands.
        test_requires: What its tests need beyond that.
        entry_points: Text of ``entry_points.txt``.
        licence: As it is written, at most 60 characters.
    """

    name: str
    version: str
    requires: tuple[str, ...]
    test_requires: tuple[str, ...]
    entry_points: str
    licence: str = ""


def read_metadata(files: Mapping[str, bytes]) -> Metadata:
    """Collect metadata from ``PKG-INFO``, ``pyproject.toml``, ``setup.cfg``, ``setup.py`` and requirement files.

    Damaged files count as empty: whether the suite runs decides, not whether the metadata is tidy.
    """
    found = _Found()
    found.read_pkg_info(_text(files, "PKG-INFO"))
    found.read_pyproject(_text(files, "pyproject.toml"))
    found.read_setup_cfg(_text(files, "setup.cfg"))
    found.read_setup_py(_text(files, "setup.py"))
    for path in sorted(files):
        if path.count("/") <= 1 and len(files[path]) < 65_536:
            if _REQUIREMENT_FILES.fullmatch(path):
                found.tests += _text(files, path).splitlines()
            elif _DEVELOPMENT_FILES.fullmatch(path):
                found.development += _text(files, path).splitlines()
    own = normalise(found.name)
    requires = clean_requirements(found.requires, own)
    wanted = clean_requirements(found.tests, own) or clean_requirements(found.development, own)
    tests = [item for item in wanted if item not in requires]
    return Metadata(found.name, found.version or "0", tuple(requires), tuple(tests), _entry_points(found.entry_points), found.licence[:60])


def normalise(name: str) -> str:
    """Return a distribution name as registries compare it: ``"Zope.Interface"`` -> ``"zope-interface"``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def clean_requirements(lines: Iterable[str], own: str = "") -> list[str]:
    """Keep plain requirements: no options, no addresses, no runners of other kinds, not the package itself."""
    kept: dict[str, str] = {}
    for line in lines:
        text = line.split(" #")[0].strip()
        match = _REQUIREMENT.fullmatch(text)
        if match is None or normalise(match[1]) in (*_NO_RUNNERS, own):
            continue
        version = (match[3] or "").strip().strip("()")
        kept.setdefault(normalise(match[1]), f"{match[1]}{match[2] or ''}{version}{match[4] or ''}")
    return list(kept.values())


def _text(files: Mapping[str, bytes], path: str) -> str:
    return files.get(path, b"").decode("utf-8", "replace")


class _Found:
    def __init__(self) -> None:
        self.name = ""
        self.version = ""
        self.requires: list[str] = []
        self.tests: list[str] = []
        self.development: list[str] = []
        self.entry_points: dict[str, dict[str, str]] = {}
        self.licence = ""

    def _identify(self, name: object, version: object) -> None:
        self.name = self.name or (name if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) else "")
        self.version = self.version or (version if isinstance(version, str) and re.fullmatch(r"[A-Za-z0-9.!+_-]{1,60}", version) else "")

    def _extras(self, extras: object) -> None:
        for name, lines in extras.items() if isinstance(extras, dict) else ():
            if isinstance(name, str) and (place := self._place(name)) is not None:
                place += _strings(lines)

    def _place(self, name: str) -> list[str] | None:
        """The list that an extra or group of this name adds to."""
        if TEST_EXTRAS.fullmatch(name):
            return self.tests
        return self.development if DEVELOPMENT_EXTRAS.fullmatch(name) else None

    def _points(self, groups: object) -> None:
        for group, rows in groups.items() if isinstance(groups, dict) else ():
            if isinstance(rows, dict):
                self.entry_points.setdefault(str(group), {}).update({str(key): str(value) for key, value in rows.items()})

    def read_pkg_info(self, text: str) -> None:
        if not text:
            return
        message = email.parser.Parser().parsestr(text, headersonly=True)
        self._identify(message.get("Name"), message.get("Version"))
        classifiers = [row.rpartition(" :: ")[2] for row in message.get_all("Classifier") or [] if row.startswith("License ::")]
        named = [message.get("License-Expression"), *classifiers, message.get("License")]
        self.licence = next((str(item).split("\n")[0] for item in named if item), "")
        for line in message.get_all("Requires-Dist") or []:
            requirement, _, marker = line.partition(";")
            extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
            if extra is None:
                self.requires.append(line)
            elif (place := self._place(extra[1])) is not None:
                always = marker.replace(extra[0], "python_version >= '3'")
                place.append(f"{requirement};{always}")

    def read_pyproject(self, text: str) -> None:
        try:
            data: Any = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            return
        project, tool = _table(data, "project"), _table(data, "tool")
        self._identify(project.get("name"), project.get("version"))
        licence = project.get("license")
        self.licence = self.licence or str(_table(licence).get("text", "") if isinstance(licence, dict) else licence or "").split("\n")[0]
        self.requires += _strings(project.get("dependencies"))
        self._extras(project.get("optional-dependencies"))
        self._extras(data.get("dependency-groups"))
        self._points(project.get("entry-points"))
        self._points({"console_scripts": project.get("scripts")})
        poetry = _table(tool, "poetry")
        self._identify(poetry.get("name"), poetry.get("version"))
        self.requires += [name for name in _table(poetry, "dependencies") if name != "python"]
        self.development += list(_table(poetry, "dev-dependencies"))
        for name, group in _table(poetry, "group").items():
            if (place := self._place(name)) is not None:
                place += list(_table(group, "dependencies"))
        self._points(poetry.get("plugins"))
        self._extras(_table(tool, "pdm").get("dev-dependencies"))
        self.development += _strings(_table(tool, "uv").get("dev-dependencies"))
        for name, environment in _table(_table(tool, "hatch"), "envs").items():
            if name == "default" or "test" in name:
                self.tests += _strings(_table(environment).get("dependencies")) + _strings(_table(environment).get("extra-dependencies"))

    def read_setup_cfg(self, text: str) -> None:
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(text)
            sections: Mapping[str, Mapping[str, str]] = {name: dict(parser[name]) for name in parser.sections()}
        except configparser.Error:
            return
        self._identify(sections.get("metadata", {}).get("name"), sections.get("metadata", {}).get("version"))
        options = sections.get("options", {})
        self.requires += options.get("install_requires", "").splitlines()
        self.tests += options.get("tests_require", "").splitlines()
        self._extras({name: text.splitlines() for name, text in sections.get("options.extras_require", {}).items()})
        points = {}
        for group, text_rows in sections.get("options.entry_points", {}).items():
            points[group] = dict(_pair(row) for row in text_rows.splitlines() if "=" in row)
        self._points(points)

    def read_setup_py(self, text: str) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return
        named = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "setup":
                given = {word.arg: _literal(word.value, named) for word in node.keywords if word.arg}
                self._identify(given.get("name"), given.get("version"))
                self.requires += _strings(given.get("install_requires"))
                self.tests += _strings(given.get("tests_require"))
                self._extras(given.get("extras_require"))
                groups = given.get("entry_points")
                if isinstance(groups, dict):
                    self._points({g: dict(_pair(row) for row in _strings(rows) if "=" in row) for g, rows in groups.items()})


def _literal(node: ast.expr, named: Mapping[str, ast.expr]) -> Any:
    """The value of a literal, of a name bound to one, or ``None``."""
    if isinstance(node, ast.Name) and node.id in named:
        node = named[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _table(data: Any, key: str = "") -> dict[str, Any]:
    value = data.get(key) if key and isinstance(data, dict) else data
    return value if isinstance(value, dict) else {}


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.splitlines()
    return [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple, set)) else []


def _pair(row: str) -> tuple[str, str]:
    name, _, target = row.partition("=")
    return name.strip(), target.strip()


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for group, rows in sorted(groups.items()):
        if rows and re.fullmatch(r"[\w.-]+", group):
            lines.append(f"[{group}]")
            lines += [f"{name} = {target}" for name, target in sorted(rows.items()) if "\n" not in name + target]
    return "".join(f"{line}\n" for line in lines)
