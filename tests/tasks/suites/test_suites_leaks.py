"""Leaks of every kind, planted one by one into a clean workspace: each is found, and the clean one is silent."""

from __future__ import annotations

import py_compile
import zipfile
from pathlib import Path

import pytest
from leak_plants import PLANTS, git, make_checkout
from suite_kit import FILES, PRICE, write_files

from strop.core.errors import TaskError
from strop.tasks.admission.leaks import KINDS, LeakReport, scan
from strop.tasks.admission.needles import leak_in_text, needles_of, normalise, solution_lines

GOLD = PRICE.encode()
BUGGY = PRICE.replace("if count >= 10:", "if count > 10:").encode()
NEEDLES = needles_of({"shop/price.py": BUGGY}, {"shop/price.py": GOLD})


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """The bug, committed once, with the caches that honest work leaves."""
    folder = write_files(tmp_path / "w", {**FILES, "shop/price.py": BUGGY})
    make_checkout(folder)
    py_compile.compile(str(folder / "shop" / "price.py"), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    write_files(folder, {".pytest_cache/v/cache/nodeids": b"[]", "notes.txt.orig": b"nothing\n"})
    return folder


def test_the_clean_workspace_is_silent(workspace: Path) -> None:
    report = scan(workspace, NEEDLES)
    assert report.leaks == []
    assert report.looked_at["git objects"] > 5
    assert report.looked_at["byte code"] == 1


@pytest.mark.parametrize("name", list(PLANTS))
def test_planted_leak_is_found(workspace: Path, name: str) -> None:
    plant, kind = PLANTS[name]
    plant(workspace, "shop/price.py", GOLD)
    found = scan(workspace, NEEDLES).leaks
    assert kind in {leak.kind for leak in found}, found


def test_every_kind_is_planted() -> None:
    assert {kind for _, kind in PLANTS.values()} == set(KINDS)


def test_places_outside_are_looked_at_by_name(workspace: Path, tmp_path: Path) -> None:
    outside = write_files(tmp_path / "site-packages", {"vendored/shop/price.py": GOLD, "other/unrelated.py": GOLD})
    with zipfile.ZipFile(outside / "bundled.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("shop/price.py", GOLD)
    leaks = scan(workspace, NEEDLES, outside=[str(outside)]).leaks
    assert sorted(leak.path.rpartition("site-packages/")[2] for leak in leaks) == ["bundled.whl!shop/price.py", "vendored/shop/price.py"]
    clean = write_files(tmp_path / "clean", {"vendored/shop/price.py": BUGGY})
    assert scan(workspace, NEEDLES, outside=[str(clean)]).leaks == []


def test_git_configuration_of_the_workspace_is_not_used(workspace: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for key in ("core.fsmonitor", "core.sshCommand", "core.pager", "diff.external"):
        git(workspace, "config", key, f"touch {marker}")
    assert scan(workspace, NEEDLES).leaks == []
    assert not marker.exists()


def test_links_and_damage_are_noted_not_followed(workspace: Path) -> None:
    (workspace / "loop").symlink_to(workspace)
    (workspace / "broken.whl").write_bytes(b"PK\x03\x04 and no more")
    (workspace / "broken.tar.gz").write_bytes(b"\x1f\x8b\x08 and no more")
    report = scan(workspace, NEEDLES)
    assert report.leaks == []
    assert len([row for row in report.unread if "loop" in row or "broken" in row]) == 3


def test_no_workspace(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="can't be read"):
        scan(tmp_path / "none", NEEDLES)


def test_a_needle_survives_other_layout_but_not_the_bug() -> None:
    (needle,) = NEEDLES
    assert needle.is_in(normalise(PRICE.replace("    ", "\t").replace("\n", "\r\n")))
    assert not needle.is_in(normalise(BUGGY.decode()))
    assert not needle.is_in(normalise("if count >= 10:"))


def test_a_removed_line_is_a_needle_too() -> None:
    workspace = GOLD.replace(b"    return price\n", b"    price = 0\n    return price\n")
    (needle,) = needles_of({"shop/price.py": workspace}, {"shop/price.py": GOLD})
    assert needle.windows


def test_instruction_with_a_line_of_the_solution() -> None:
    assert leak_in_text("Use `if count >= 10:` there.", [(BUGGY, GOLD)]) == "if count >= 10:"
    assert leak_in_text("def discount(price, count): is wrong for ten things", [(BUGGY, GOLD)]) == ""


def test_signatures_and_documentation_may_be_told() -> None:
    doc = b'    """Say what it does at length."""\n    # a comment of some length\n'
    gold = b"def f(first, second,\n      third=None):\n" + doc + b"    return first + second\n"
    assert solution_lines(b"", gold) == ["return first + second"]


def test_a_report_is_plain_data() -> None:
    assert LeakReport().to_json() == {"leaks": [], "looked_at": {}, "unread": []}
