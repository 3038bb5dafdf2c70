"""Compiled layers speed imports up and never show old code."""

from __future__ import annotations

from pathlib import Path

from strop.sandboxes.bytecode import compile_tree, layer_of


def test_tree_itself_is_untouched_and_work_is_done_once(base: Path) -> None:
    before = sorted(base.rglob("*"))
    (base / "pkg/wrong.py").write_text("def (:\n")
    layer = Path(compile_tree(str(base)))
    (base / "pkg/wrong.py").unlink()
    assert sorted(base.rglob("*")) == before
    assert layer_of(str(base)) == str(layer)
    names = sorted(str(path.relative_to(layer)) for path in layer.rglob("*.pyc"))
    assert [name.split(".")[0] for name in names] == [
        "pkg/__pycache__/__init__",
        "pkg/__pycache__/core",
        "pkg/__pycache__/extra",
        "tests/__pycache__/__init__",
        "tests/__pycache__/test_core",
    ]
    assert compile_tree(str(base)) == str(layer)


def test_runs_use_it_for_equal_source_only(session, base: Path) -> None:
    # A planted difference between compiled code and source shows which of the two a run executes.
    import importlib.util

    source = (base / "pkg/core.py").read_bytes()
    layer = Path(compile_tree(str(base)))
    planted = compile("def double(x):\n    return 'from the compiled layer'\n", "/workspace/pkg/core.py", "exec")
    file = next((layer / "pkg/__pycache__").glob("core.*.pyc"))
    file.write_bytes(importlib._bootstrap_external._code_to_hash_pyc(planted, importlib.util.source_hash(source), True))  # type: ignore[attr-defined]

    async def work(provider) -> tuple[str, ...]:
        box = await provider.start(str(base))
        show = ["-c", "from pkg.core import double; print(double(2))"]
        first = await box.run_python(show, timeout_s=20)
        names = box.list_files()
        box.write("pkg/core.py", source.replace(b"2 * x", b"3 * x"))
        second = await box.run_python(show, timeout_s=20)
        isolated = await provider.run_isolated([str(base)], show, timeout_s=20)
        changes = box.changes()
        await box.stop()
        assert list(changes) == ["pkg/core.py"]
        assert not [name for name in names if name.endswith(".pyc")]
        return first.output, second.output, isolated.stdout.decode()

    assert session.run(work) == ("from the compiled layer\n", "6\n", "from the compiled layer\n")
