"""Reading sources that nobody checked: folders and archives with everything that can be wrong with them."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import TaskError
from strop.tasks.repository import files as reading
from strop.tasks.repository.files import is_skipped, problem_of, read_archive, read_folder
from strop.tasks.repository.gitread import GitCheckout
from strop.tasks.repository.source import open_source


def make_tar(path: Path, members: dict[str, bytes | tarfile.TarInfo], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            if isinstance(data, tarfile.TarInfo):
                archive.addfile(data)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def git(folder: Path, *arguments: str) -> str:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    settings = ["-c", "core.hooksPath=/dev/null", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *settings, *arguments], cwd=folder, env={**os.environ, **names}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_archive_is_read_without_its_top_folder(tmp_path: Path) -> None:
    files = read_archive(make_tar(tmp_path / "x-1.tar.gz", {"x-1/a.py": b"1\r\n", "x-1/p/b.py": b"2"}))
    assert files.content == {"a.py": b"1\r\n", "p/b.py": b"2"}
    assert files.notes == {}


@pytest.mark.parametrize(
    ("name", "member", "reason"),
    [
        ("../out.py", b"x", "path leaves the tree"),
        ("/etc/out.py", b"x", "path leaves the tree"),
        ("t/na\nme.py", b"x", "name can't be used by every tool"),
        ("t/link.py", link("t/link.py", "/etc/passwd"), "link or device"),
        ("t/a", link("t/a", "a"), "link or device"),
        ("t/hard", link("t/hard", "t/keep.py", tarfile.LNKTYPE), "link or device"),
        ("t/fifo", link("t/fifo", "", tarfile.FIFOTYPE), "link or device"),
    ],
)
def test_members_that_are_no_plain_files_are_left_out_and_noted(
    tmp_path: Path, name: str, member: bytes | tarfile.TarInfo, reason: str
) -> None:
    files = read_archive(make_tar(tmp_path / "t.tar.gz", {"t/keep.py": b"k", name: member}))
    assert sorted(files.content.values()) == [b"k"]
    assert list(files.notes) == [reason]


def test_name_that_is_not_utf8(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "t.tar", "w", encoding="latin-1", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("t/caf\xe9.py", "t/ok.py"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    files = read_archive(tmp_path / "t.tar")
    assert list(files.content) == ["ok.py"]
    assert files.notes == {"name isn't UTF-8": (1, r"'t/caf\udce9.py'")}
    os.mkdir(tmp_path / "folder")
    (tmp_path / "folder" / "ok.py").write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(tmp_path / "folder") + b"/caf\xe9.py")).write_bytes(b"x")
    assert list(read_folder(tmp_path / "folder").content) == ["ok.py"]


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.bz2", ".tar.xz"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95, 0.999])
def test_truncated_archive_is_refused(tmp_path: Path, suffix: str, share: float) -> None:
    path = make_tar(tmp_path / f"x{suffix}", {f"x/{n}.py": os.urandom(2000) for n in range(20)}, f"w:{suffix.rpartition('.')[2]}")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TaskError, match="truncated"):
        read_archive(path)


@given(st.binary(max_size=300), st.sampled_from([".tar.gz", ".zip", ".tar", ".tar.xz", ".tar.zst"]))
@settings(max_examples=60, deadline=None)
def test_noise_never_crashes(tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"noise{suffix}"
    path.write_bytes(data)
    with pytest.raises(TaskError):
        read_archive(path)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 1000)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "big.py").write_bytes(b"x" * 1001)
    with pytest.raises(TaskError, match=r"'big.py' is larger than"):
        read_folder(tmp_path / "f")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/b.py", b"0" * 1_000_000)
    with pytest.raises(TaskError, match="larger than"):
        read_archive(tmp_path / "bomb.zip")
    monkeypatch.setattr(reading, "MAX_TOTAL_BYTES", 1500)
    with pytest.raises(TaskError, match="holds more than"):
        read_archive(make_tar(tmp_path / "t.tar.gz", {"t/a": b"x" * 900, "t/b": b"x" * 900}))


def test_a_file_of_10_gb_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "data.bin").touch()
    os.truncate(tmp_path / "data.bin", 10 << 30)
    with pytest.raises(TaskError, match=r"'data.bin' is larger than 64 MiB"):
        read_folder(tmp_path)


def test_folder_with_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.py").write_bytes(b"a")
    (tmp_path / "p" / "again").symlink_to(tmp_path)
    (tmp_path / "p" / "out.py").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "p" / "pipe.py")
    files = read_folder(tmp_path)
    assert files.content == {"p/a.py": b"a"}
    assert files.notes["link"][0] == 2


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir(mode=0)
    with pytest.raises(TaskError, match="Permission denied"):
        read_folder(tmp_path)


def test_caches_and_backups_are_never_part_of_a_source() -> None:
    for path in ("a/__pycache__/b.pyc", "a.py.orig", ".git/config", "x/.mypy_cache/y", ".pytest_cache/v", "build/lib/a.py", "dist/a.whl"):
        assert is_skipped(path), path
    for path in ("src/build/__init__.py", "a/dist.py", "tests/original.py"):
        assert not is_skipped(path), path


@given(st.text(max_size=60))
@settings(deadline=None)
def test_a_path_without_problem_stays_below(path: str) -> None:
    if not problem_of(path):
        assert os.path.normpath(f"/w/{path}").startswith("/w/")


@pytest.mark.parametrize("text", ["no such", "-e x", "../x", "a b", "name==", "x; import os", "name @ file:///etc"])
def test_what_is_no_source_is_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(TaskError, match="no folder, no archive and no package name"):
        open_source(text, download_dir=tmp_path)


def test_unknown_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.rar").write_bytes(b"x")
    with pytest.raises(TaskError, match=r"isn't a source archive; known: .tar.gz"):
        open_source(str(tmp_path / "a.rar"), download_dir=tmp_path)


def test_git_checkout_is_read_without_its_configuration(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q")
    (repo / "a.py").write_bytes(b"one\r\n")
    (repo / "link").symlink_to("/etc/passwd")
    git(repo, "add", ".")
    git(repo, "commit", "-q", "-m", "first\n\nbody")
    (repo / "a.py").write_bytes(b"two\n")
    (repo / "test_a.py").write_bytes(b"x\n")
    git(repo, "add", ".")
    git(repo, "commit", "-q", "-m", "second")
    (repo / "a.py").write_bytes(b"not committed\n")
    marker = tmp_path / "ran"
    for key in ("core.fsmonitor", "diff.external", "core.pager", "uploadpack.packObjectsHook"):
        git(repo, "config", key, f"touch {marker}; false")
    checkout = GitCheckout(repo)
    files = checkout.files()
    assert files.content == {"a.py": b"two\n", "test_a.py": b"x\n"}
    assert files.notes == {"link or submodule": (1, "'link'")}
    commits = checkout.commits(10)
    assert [commit.message for commit in commits] == ["second", "first\n\nbody"]
    changes = checkout.changes(commits)[commits[0].sha]
    assert [(change.path, bool(change.before), bool(change.after)) for change in changes] == [
        ("a.py", True, True),
        ("test_a.py", False, True),
    ]
    assert checkout.blobs([changes[0].before]) == {changes[0].before: b"one\r\n"}
    assert not marker.exists()


def test_git_without_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    with pytest.raises(TaskError, match="has no commit to start from"):
        GitCheckout(tmp_path)
