"""A small repository with a suite of its own, and an environment made of the pytest that runs these tests, so that no network is needed."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from strop.core.config import SandboxConfig
from strop.core.episode import Episode, EpisodeKey
from strop.core.task import Task
from strop.sandboxes import BubblewrapProvider
from strop.tasks.admission.build import BuildOptions, SuiteBuild
from strop.tasks.admission.hiding import without_tests
from strop.tasks.admission.pool import FORMAT, SuitePool, write_task
from strop.tasks.admission.record import TREE, SuiteTask, SuiteVerifier
from strop.tasks.admission.tally import SourceTally
from strop.tasks.poolfile import write_tree_archive
from strop.tasks.repository.environment import environment_name
from strop.tasks.repository.metadata import read_metadata
from strop.tasks.repository.suite import VENV, SuiteSpec

STOCK = '''\
"""Stock of a shop."""


class Stock:
    """Numbers of things by name."""

    def __init__(self):
        self._items = {}

    def add(self, name, count=1):
        """Add things; their number must be positive."""
        if count <= 0:
            raise ValueError("count must be positive")
        self._items[name] = self._items.get(name, 0) + count

    def take(self, name, count=1):
        """Take things; returns how many are left."""
        left = self._items.get(name, 0) - count
        if left < 0:
            raise KeyError(name)
        self._items[name] = left
        return left

    def total(self):
        """Number of all things."""
        return sum(self._items.values())


def restock(stock, wanted, *, limit=10):
    """Add what is wanted, at most limit of each."""
    added = []
    for name, count in wanted:
        number = min(count, limit)
        if number > 0:
            stock.add(name, number)
            added.append(name)
    return added
'''
PRICE = '''\
"""Prices."""


def with_tax(price, rate=20):
    """Price with tax, in cents, rounded down."""
    return price + price * rate // 100


def discount(price, count):
    """Price of one thing where count are bought."""
    if count >= 10:
        return price * 80 // 100
    elif count >= 5:
        return price * 90 // 100
    return price
'''
BUGGY = PRICE.replace("count >= 5", "count > 5")
TEST_STOCK = """\
import pytest

from shop.stock import Stock, restock


@pytest.fixture
def stock():
    found = Stock()
    found.add("nut", 3)
    return found


def test_add(stock):
    stock.add("nut")
    assert stock.take("nut", 0) == 4


def test_add_nothing(stock):
    with pytest.raises(ValueError):
        stock.add("nut", 0)


def test_take(stock):
    assert stock.take("nut", 2) == 1


def test_take_all(stock):
    assert stock.take("nut", 3) == 0


def test_take_too_many(stock):
    with pytest.raises(KeyError):
        stock.take("nut", 4)


def test_total(stock):
    stock.add("bolt", 2)
    assert stock.total() == 5


@pytest.mark.parametrize("count,left", [(2, 2), (20, 10)])
def test_restock(stock, count, left):
    assert restock(stock, [("washer", count)]) == ["washer"]
    assert stock.take("washer", 0) == left


def test_restock_nothing(stock):
    assert restock(stock, [("washer", 0)]) == []
"""
TEST_PRICE = """\
import unittest

from shop.price import discount, with_tax


class TestPrice(unittest.TestCase):
    def test_tax(self):
        self.assertEqual(with_tax(100), 120)

    def test_rate(self):
        self.assertEqual(with_tax(200, rate=5), 210)

    def test_few(self):
        self.assertEqual(discount(100, 4), 100)

    def test_some(self):
        self.assertEqual(discount(100, 5), 90)

    def test_many(self):
        self.assertEqual(discount(100, 10), 80)
"""
PROJECT = '[project]\nname = "shop"\nversion = "2.0"\nlicense = "MIT"\n'
FILES = {
    "pyproject.toml": PROJECT.encode(),
    "shop/__init__.py": b"",
    "shop/stock.py": STOCK.encode(),
    "shop/price.py": PRICE.encode(),
    "tests/test_stock.py": TEST_STOCK.encode(),
    "tests/test_price.py": TEST_PRICE.encode(),
}
OLDER = {
    **FILES,
    "pyproject.toml": PROJECT.replace("2.0", "1.0").encode(),
    "shop/price.py": PRICE.split("\n\ndef discount")[0].encode() + b"\n",
    "tests/test_price.py": TEST_PRICE.split("    def test_few")[0].replace("discount, ", "").encode(),
}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return folder


def give_environment(pool: Path, files: dict[str, bytes], *, runner: str = "pytest") -> Path:
    """Put the environment of a source where ``install`` looks for it: pytest and what it needs, copied from this interpreter."""
    target = pool / "environments" / environment_name(read_metadata(files), runner=runner)
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            if file.parts[0] != ".." and "__pycache__" not in file.parts:
                place = target / file
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(distribution.locate_file(file)), place)
    return target


def make_pool(folder: Path) -> SuitePool:
    """A pool with one task, written by hand: the discount for five is off by one, and ``test_some`` is hidden."""
    environment = give_environment(folder, FILES)
    write_tree_archive(folder / "trees" / "shop-2.0.tar.zst", FILES)
    tree = {"name": "shop", "version": "2.0", "entry_points": "", "environment": environment.name}
    (folder / "pool.json").write_text(json.dumps({"format": FORMAT, "trees": {"shop-2.0": tree}, "sources": {}}))
    write_task(folder / "tasks", make_task())
    return SuitePool(folder, folder.with_name(f"{folder.name}.cache"))


def make_task() -> SuiteTask:
    names = ("tax", "rate", "few", "some", "many")
    tests = [f"tests/test_price.py::TestPrice::test_{name}" for name in names]
    run = f"import sys;sys.path[:0]=['/workspace','/workspace/{VENV}'];import pytest;sys.exit(pytest.main(sys.argv[1:]))"
    hidden = without_tests(TEST_PRICE.encode(), ["TestPrice::test_some"])
    assert hidden is not None
    return SuiteTask(
        task_id="shop-2.0:shop.price.discount#1",
        kind="mutation",
        families=("comparison",),
        cluster="shop/price.py:discount",
        tree="shop-2.0",
        instruction="There is a bug in shop. Find it and repair it.",
        base={"shop/price.py": BUGGY.encode(), "tests/test_price.py": hidden},
        gold={"shop/price.py": TREE},
        tests={"tests/test_price.py": TREE},
        verifier=SuiteVerifier(
            spec=SuiteSpec(),
            package="shop/price.py",
            fail_to_pass=(tests[3],),
            pass_to_pass=(*tests[:3], tests[4]),
            hidden=(tests[3],),
            cpu_s=20.0,
        ),
        visible=("-c", run, "-q", "--no-header", "-p", "no:cacheprovider", "tests/test_price.py"),
        split="train",
        source="shop 2.0",
        licence="MIT",
    )


def episode_of(task: Task, changes: Mapping[str, bytes | None]) -> Episode:
    key = EpisodeKey(phase="rl", step=1, task_id=task.task_id, sample=0)
    return Episode(key=key, traces=(), turns=(), stop_reason="submitted", changes=changes)


def build_once(options: BuildOptions, *sources: Path) -> SourceTally:
    """Run a build; returns the tally of the last source."""

    async def run() -> SourceTally:
        provider = BubblewrapProvider(SandboxConfig(workers=2, memory_mb=512))
        scratch = options.work / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            build = SuiteBuild(options, provider, scratch)
            for item in sources:
                await build.add(str(item))
            return build.tallies[-1]
        finally:
            await provider.close()

    return asyncio.run(run())
