"""Orders, the result channel, hidden tests, instructions, tasks as data: the parts of the gate that need no box."""

from __future__ import annotations

import dataclasses
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from suite_kit import FILES, TEST_PRICE, TEST_STOCK

from strop.core.errors import TaskError
from strop.tasks.admission.hiding import choose_hidden, hide, without_tests
from strop.tasks.admission.instruct import instruction
from strop.tasks.admission.pool import write_task
from strop.tasks.admission.record import TREE, SuiteTask, SuiteVerifier, delta_from_json, delta_to_json, is_solved, resolve
from strop.tasks.makers.draft import Draft
from strop.tasks.repository.layout import find_layout, is_test_path, module_name
from strop.tasks.repository.metadata import clean_requirements, read_metadata
from strop.tasks.repository.suite import Coverage, SuiteRun, SuiteSpec, file_of, function_of, read_run, shuffled


@dataclass
class Left:
    stdout: bytes
    stdout_truncated: bool = False
    stderr: str = ""
    exit_code: int | None = 0
    killed_by: str = ""
    duration_s: float = 0.1


def lines(*texts: str, nonce: str = "n") -> bytes:
    return b"".join(f"{nonce} {text}\n".encode() for text in texts)


GOOD = ("ready", "loaded", "0 p 3", "1 f 4", "2 s 0", "end ok")


def test_a_good_channel() -> None:
    run = read_run("n", 4, Left(lines(*GOOD)))
    assert run.outcomes == ("p", "f", "s", "m")
    assert run.ending == "ok"
    assert run.passed() == {0}
    assert run.milliseconds == {0: 3, 1: 4, 2: 0}


@pytest.mark.parametrize(
    ("left", "ending"),
    [
        (Left(lines("ready", "loaded", "0 p 1")), "lost"),
        (Left(lines("ready", "loaded", "0 p 1", "0 p 1", "end ok")), "forged"),
        (Left(lines("ready", "loaded", "7 p 1", "end ok")), "forged"),
        (Left(lines("ready") + b"x 0 p 1\n" + lines("end ok")), "forged"),
        (Left(lines("ready", "loaded", "end exit0")), "exit0"),
        (Left(lines("ready", "loaded", "end signal24")), "timeout"),
        (Left(lines("ready", "loaded", "0 p 1"), killed_by="memory"), "memory"),
        (Left(lines("ready"), stdout_truncated=True), "output"),
        (Left(lines(*GOOD), killed_by="memory"), "ok"),
    ],
)
def test_bad_channels(left: Left, ending: str) -> None:
    run = read_run("n", 2 if ending != "ok" else 4, left)
    assert run.ending == ending
    if ending != "ok":
        assert not run.passed()


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_noise_never_passes(noise: bytes) -> None:
    assert not read_run("secret-nonce", 3, Left(noise)).passed()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), unique=True, max_size=30), st.integers(0, 5))
@settings(deadline=None)
def test_shuffle_keeps_every_test_and_what_shares_a_class_together(rows: list[tuple[int, int, int]], seed: int) -> None:
    tests = [f"t/test_{a}.py::Test{b}::test_{c}" for a, b, c in rows]
    order = shuffled(tests, seed)
    assert sorted(order) == sorted(tests)
    assert order == shuffled(tests, seed)
    for depth in (1, 2):
        heads = ["::".join(test.split("::")[:depth]) for test in order]
        assert len(list(dict.fromkeys(heads))) == sum(a != b for a, b in zip(["", *heads], heads, strict=False))


def test_shuffle_gives_other_orders() -> None:
    tests = [f"a.py::test_{number}" for number in range(20)]
    assert len({tuple(shuffled(tests, seed)) for seed in range(5)}) == 5


def test_names() -> None:
    assert file_of("a/b.py::T::f[x::y]") == "a/b.py"
    assert function_of("a/b.py::T::f[x::y]") == "a/b.py::T::f"


def run_of(outcomes: str, ending: str = "ok") -> SuiteRun:
    return SuiteRun(
        outcomes=tuple(outcomes), milliseconds={}, ending=ending, is_loaded=True, is_ready=True, traces=(), text="", duration_s=0.1
    )


@pytest.mark.parametrize("outcomes", ["sss", "ppsp", "ppm", "ppx", "ppX", "ppe", ""])
def test_skipped_missing_and_expected_failures_solve_nothing(outcomes: str) -> None:
    assert not is_solved(run_of(outcomes))


def test_solved_needs_a_good_end() -> None:
    assert is_solved(run_of("ppp"))
    assert not is_solved(run_of("ppp", "exit0"))


def test_coverage_reads_what_it_can() -> None:
    run = run_of("pp")
    traced = SuiteRun(
        **{
            **{name: getattr(run, name) for name in run.__slots__},
            "traces": (
                '0 [[0, 1], ["0 3 a.py", "1 9 b c.py"]]',
                "broken",
                "1 [[1], []]",
                "1 [[44], []]",
                '"x" [[1], []]',
            ),
        }
    )
    coverage = Coverage.read(traced)
    assert coverage.functions == {("a.py", 3): {0}, ("b c.py", 9): {0, 1}}
    assert coverage.tests_of("b c.py", 1, 9) == {0, 1}
    assert coverage.tests_of("b c.py", 10, 20) == set()


def test_hidden_tests_are_half_and_one_stays() -> None:
    fails = [f"t.py::test_{number}[{part}]" for number in range(5) for part in "ab"]
    hidden = choose_hidden(fails, seed=0, key="k")
    assert len(hidden) == 2
    assert choose_hidden(fails[:2], seed=0, key="k") == set()


def test_a_test_is_cut_out_of_its_file() -> None:
    text = without_tests(TEST_STOCK.encode(), ["test_restock", "test_add"])
    assert text is not None
    assert b"def test_restock(" not in text
    assert b"parametrize" not in text
    assert b"def test_restock_nothing" in text
    text = without_tests(TEST_PRICE.encode(), [f"TestPrice::test_{name}" for name in ("tax", "rate", "few", "some", "many")])
    assert text is not None
    assert b"class TestPrice" not in text
    assert without_tests(TEST_PRICE.encode(), ["TestPrice::test_none"]) is None


def test_what_cannot_be_cut_stays_visible() -> None:
    texts, gone = hide(FILES, ["tests/test_price.py::TestPrice::test_tax", "tests/test_stock.py::test_made_by_a_loop"])
    assert list(texts) == ["tests/test_price.py"]
    assert gone == {"tests/test_price.py::TestPrice::test_tax"}


def draft(kind: str, **more: object) -> Draft:
    given = {"families": ("function",), "cluster": "a.py:f", "base": {"a.py": b""}, "gold": {"a.py": b"x"}, "subject": "shop.f", **more}
    return Draft(kind=kind, **given)  # type: ignore[arg-type]


def test_instructions_say_what_is_asked() -> None:
    assert "Find them and repair them" in instruction(draft("combined"), package="shop", visible=["t::a"], hidden=[])
    text = instruction(draft("deletion", details="def f(a):\nDoes it."), package="shop", visible=["t::a"], hidden=["t::b", "t::c"])
    assert "`shop.f` is missing" in text
    assert "def f(a):" in text
    assert "and 2 that you can't see" in text
    assert "t::b" not in text
    assert "t::c" in instruction(draft("history"), package="shop", visible=["t::a"], hidden=["t::b", "t::c"])


def make_task() -> SuiteTask:
    return SuiteTask(
        task_id="shop:price#1",
        kind="mutation",
        families=("operator",),
        cluster="shop/price.py:f",
        tree="shop-1",
        instruction="Repair it.",
        base={"shop/price.py": b"x\r\n", "gone.py": None, "data.bin": b"\xff\x00"},
        gold={"shop/price.py": TREE},
        tests={"tests/test_price.py": TREE},
        verifier=SuiteVerifier(
            spec=SuiteSpec(roots=("src",)), package="shop/price.py", fail_to_pass=("a",), pass_to_pass=("b",), hidden=("a",)
        ),
        visible=("-c", "x"),
        split="train",
        source="shop 1",
    )


def test_a_task_survives_json() -> None:
    assert SuiteTask.from_json(make_task().to_json()) == make_task()


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ""])
def test_a_path_out_of_the_workspace_is_refused(path: str) -> None:
    with pytest.raises(TaskError, match="leaves the workspace"):
        delta_from_json({path: "x"})


def test_damaged_tasks_are_refused() -> None:
    data = make_task().to_json()
    with pytest.raises(TaskError, match="format"):
        SuiteTask.from_json({**data, "format": 99})
    del data["verifier"]
    with pytest.raises(TaskError, match="verifier"):
        SuiteTask.from_json(data)


@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,5}/[a-z]{1,5}", fullmatch=True), st.one_of(st.none(), st.binary(max_size=30), st.just(TREE)))
)
@settings(max_examples=40, deadline=None)
def test_delta_round_trip(delta: dict[str, object]) -> None:
    assert delta_from_json(delta_to_json(delta)) == delta  # type: ignore[arg-type]
    resolved = resolve(delta, dict.fromkeys(delta, b"tree"))  # type: ignore[arg-type]
    assert all(resolved[path] == (b"tree" if data is TREE else data) for path, data in delta.items())


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    write_task(tmp_path, make_task())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # Python ignores the signal and gets the error
    try:
        with pytest.raises(TaskError, match="can't be written: File too large"):
            write_task(tmp_path, dataclasses.replace(make_task(), instruction=os.urandom(2000).hex()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ------------------------------------------------------------------------------------------------ what a repository says about itself


def test_metadata_from_every_place() -> None:
    files = {
        "PKG-INFO": b'Name: My.Pkg\nVersion: 3.1\nLicense: MIT\nRequires-Dist: six (>=1.0)\nRequires-Dist: mock; extra == "test"\n'
        b'Requires-Dist: sphinx; extra == "doc"\n\nbody',
        "pyproject.toml": b'[project]\nname="other"\ndependencies=["attrs>=20"]\n'
        b'[project.optional-dependencies]\ntest=["pytest-cov","freezegun"]\n'
        b'[dependency-groups]\ndev=["hypothesis"]\n[project.scripts]\nrun="pkg:main"\n',
        "setup.cfg": b"[options]\ninstall_requires =\n    toml\n[options.extras_require]\ntesting =\n    responses\n",
        "setup.py": b"from setuptools import setup\nNEED=['idna']\n"
        b"setup(install_requires=NEED, tests_require=['nose'], version=open('x').read())\n",
        "requirements-test.txt": b"-r other.txt\nparameterized==1.0 # why\nhttps://x/y.zip\n",
    }
    found = read_metadata(files)
    assert (found.name, found.version, found.licence) == ("My.Pkg", "3.1", "MIT")
    assert found.requires == ("six>=1.0", "attrs>=20", "toml", "idna")
    assert found.test_requires == (
        "mock; python_version >= '3'",
        "freezegun",
        "responses",
        "nose",
        "parameterized==1.0",
    )
    assert found.entry_points == "[console_scripts]\nrun = pkg:main\n"


@pytest.mark.parametrize("name", ["PKG-INFO", "pyproject.toml", "setup.cfg", "setup.py", "requirements-test.txt"])
@given(data=st.binary(max_size=200))
@settings(max_examples=40, deadline=None)
def test_damaged_metadata_counts_as_empty(name: str, data: bytes) -> None:
    read_metadata({name: data})


@pytest.mark.parametrize(
    "line", ["-e .", "--index-url=http://x", "a @ file:///x", "git+https://x/y", "a\n-r b", "a b c", "pytest-cov", "own"]
)
def test_requirements_that_pip_must_not_see(line: str) -> None:
    assert clean_requirements([line], "own") == []


def test_layouts() -> None:
    src = find_layout(["src/a/__init__.py", "src/a/b.py", "tests/test_a.py", "setup.py", "docs/conf.py"], "a")
    assert (src.root, src.packages, src.sources, src.tests) == (
        "src",
        ("src/a",),
        ("src/a/__init__.py", "src/a/b.py"),
        ("tests/test_a.py",),
    )
    assert module_name("src/a/b.py", src) == "a.b"
    flat = find_layout(["six.py", "test_six.py", "setup.py", "tools.py"], "six")
    assert (flat.root, flat.packages, flat.sources, flat.tests) == ("", ("six.py",), ("six.py",), ("test_six.py",))
    inner = find_layout(
        ["p/__init__.py", "p/a.py", "p/tests/__init__.py", "p/tests/test_a.py", "q/__init__.py", "examples/__init__.py"], "p"
    )
    assert inner.packages == ("p", "q")
    assert inner.sources == ("p/__init__.py", "p/a.py", "q/__init__.py")
    assert find_layout(["README.py.txt", "docs/conf.py"], "x").packages == ()


def test_test_paths() -> None:
    assert all(map(is_test_path, ("tests/data.json", "a/test_b.py", "conftest.py", "p/tests/x.py", "b_test.py")))
    assert not any(map(is_test_path, ("a/testing.py", "latest/x.py", "contest.py")))
