"""Folders, archives and data files of strangers: refused with a reason, never followed, never swallowed whole."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import TaskError
from strop.tasks.importers.hostile import ReadLimits, check_path, parse_json, parse_yaml, read_archive, read_folder, read_rows

SMALL = ReadLimits(file_bytes=1000, total_bytes=3000, files=5, line_bytes=500)


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def test_what_is_harmless_is_read(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "run.sh").write_bytes(b"x")
    (tmp_path / "in" / "deep" / "run.sh").chmod(0o755)
    (tmp_path / "in" / "ü b.txt").write_bytes(b"y")
    files = read_folder(tmp_path / "in")
    assert {path: (file.data, file.executable) for path, file in files.items()} == {
        "deep/run.sh": (b"x", True),
        "ü b.txt": (b"y", False),
    }
    members = ((member("./deep", tarfile.DIRTYPE), b""), (member("./deep/run.sh", mode=0o755), b"x"), (member("ü b.txt"), b"y"))
    assert read_archive(tar_of(tmp_path / "a.tar", *members)) == files
    assert read_archive(tar_of(tmp_path / "a.tar.gz", *members, mode="w:gz")) == files
    (tmp_path / "a.tar.zst").write_bytes(zstandard.compress((tmp_path / "a.tar").read_bytes()))
    assert read_archive(tmp_path / "a.tar.zst") == files
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("deep/run.sh")
        info.external_attr = (stat.S_IFREG | 0o755) << 16
        archive.writestr(info, b"x")
        archive.writestr("ü b.txt", b"y")
    assert read_archive(tmp_path / "a.zip") == files


def plant_link(folder: Path) -> None:
    (folder / "a").symlink_to("/etc/passwd")


def plant_folder_link(folder: Path) -> None:
    (folder / "a").symlink_to("/etc")


def plant_cycle(folder: Path) -> None:
    (folder / "a").symlink_to(".")


def plant_pipe(folder: Path) -> None:
    os.mkfifo(folder / "a")


def plant_socket(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)
    try:
        socket.socket(socket.AF_UNIX).bind("a")
    finally:
        os.chdir(here)


def plant_large(folder: Path) -> None:
    (folder / "a").write_bytes(b"x" * 1001)


def plant_sparse(folder: Path) -> None:
    with open(folder / "a", "wb") as file:
        file.truncate(10 << 30)


def plant_sum(folder: Path) -> None:
    for number in range(4):
        (folder / f"a{number}").write_bytes(b"x" * 900)


def plant_many(folder: Path) -> None:
    for number in range(6):
        (folder / f"a{number}").write_bytes(b"")


def plant_no_utf8(folder: Path) -> None:
    (Path(os.fsdecode(os.fsencode(folder) + b"/a\xff"))).write_bytes(b"")


def plant_newline(folder: Path) -> None:
    (folder / "a\nb").write_bytes(b"")


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (plant_link, "symbolic link"),
        (plant_folder_link, "symbolic link"),
        (plant_cycle, "symbolic link"),
        (plant_pipe, "is a pipe"),
        (plant_socket, "is a socket"),
        (plant_large, "has at least 1001 bytes; the limits are 1000"),
        (plant_sparse, "has at least 10737418240 bytes"),
        (plant_sum, "has at least 900 bytes; the limits are 1000 for a file and 3000 for all"),
        (plant_many, "more than 5 files"),
        (plant_no_utf8, "isn't UTF-8"),
        (plant_newline, "control characters"),
    ],
)
def test_a_hostile_folder_is_refused(tmp_path: Path, plant: Callable[[Path], None], said: str) -> None:
    (tmp_path / "x").mkdir()
    plant(tmp_path / "x")
    with pytest.raises(TaskError, match=said):
        read_folder(tmp_path / "x", SMALL)


def test_the_folder_itself_may_be_no_link_and_must_exist(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/etc")
    with pytest.raises(TaskError, match="none is followed"):
        read_folder(tmp_path / "a")
    with pytest.raises(TaskError, match="can't be read"):
        read_folder(tmp_path / "b")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([(member("../a"), b"x")], "leaves the folder"),
        ([(member("b/../../a"), b"x")], "leaves the folder"),
        ([(member("/etc/passwd"), b"x")], "is absolute"),
        ([(member("C:/a"), b"x")], "is absolute"),
        ([(member("a", tarfile.SYMTYPE, "/etc"), b""), (member("a/b"), b"x")], "link or device"),
        ([(member("a", tarfile.LNKTYPE, "/etc/passwd"), b"")], "link or device"),
        ([(member("a", tarfile.CHRTYPE), b"")], "link or device"),
        ([(member("a", tarfile.FIFOTYPE), b"")], "link or device"),
        ([(member("../d", tarfile.DIRTYPE), b"")], "leaves the folder"),
        ([(member("a"), b"x"), (member("./a"), b"y")], "comes twice"),
        ([(member("a"), b"x"), (member("a/b"), b"y")], "is a file and a folder"),
        ([(member("a/b"), b"x"), (member("a"), b"y")], "comes twice"),
        ([(member("a"), b"x" * 1001)], "has at least 1001 bytes"),
        ([(member(f"a{number}"), b"") for number in range(6)], "more than 5 files"),
        ([(member("a\\b"), b"x")], "backslashes"),
        ([(member("a" * 2000), b"x")], "a path has 2000 bytes"),
    ],
)
def test_a_hostile_tar_is_refused(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        read_archive(tar_of(tmp_path / "a.tar", *members), SMALL)


def test_a_hostile_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        info = zipfile.ZipInfo("a")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(TaskError, match="symbolic link"):
        read_archive(tmp_path / "link.zip")
    with zipfile.ZipFile(tmp_path / "out.zip", "w") as archive:
        archive.writestr("../a", "x")
    with pytest.raises(TaskError, match="leaves the folder"):
        read_archive(tmp_path / "out.zip")


def test_bombs_are_stopped_while_they_are_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"\0" * 5_000_000)
    with pytest.raises(TaskError, match="has at least 5000000 bytes"):
        read_archive(tmp_path / "a.zip", SMALL)
    header = member("a")
    header.pax_headers = {"comment": "x" * 5_000_000}
    tar_of(tmp_path / "h.tar.gz", (header, b""), mode="w:gz")
    with pytest.raises(TaskError, match="holds more than 43960 bytes when it is unpacked"):
        read_archive(tmp_path / "h.tar.gz", SMALL)
    tar_of(tmp_path / "b.tar.gz", (member("a"), b"\0" * 5_000_000), mode="w:gz")
    with pytest.raises(TaskError, match="has at least 5000000 bytes"):
        read_archive(tmp_path / "b.tar.gz", SMALL)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"\0" * 5_000_000))
    with pytest.raises(TaskError, match="a line of more than 500 bytes"):
        list(read_rows(tmp_path / "c.jsonl.gz", SMALL))
    (tmp_path / "d.json.zst").write_bytes(zstandard.compress(b" " * 5_000_000))
    with pytest.raises(TaskError, match="more than 3000 bytes"):
        list(read_rows(tmp_path / "d.json.zst", SMALL))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst", "a.zip"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_damaged_archive_is_an_error_and_no_crash(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    content = b"".join(b"%d\n" % number for number in range(200))
    if name == "a.zip":
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x/y", content)
    else:
        tar_of(folder / "plain.tar", (member("x/y"), content))
        raw = (folder / "plain.tar").read_bytes()
        packed = {"a.tar": raw, "a.tar.zst": zstandard.compress(raw)}.get(name) or gzip.compress(raw)
        (folder / name).write_bytes(packed)
    good = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(good[: data.draw(st.integers(0, len(good)))])
    try:
        files = read_archive(folder / name, SMALL)
    except TaskError:
        return
    assert all(not path.startswith("/") and ".." not in path.split("/") for path in files)


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "", "a", "b"]), max_size=5).map("/".join))
def test_a_checked_path_stays_below(path: str) -> None:
    try:
        clean = check_path(path, "x")
    except TaskError:
        return
    assert os.path.normpath(os.path.join("/root", clean)) == f"/root/{clean}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' comes twice"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "is not JSON"),
        ("{", "is not JSON"),
    ],
)
def test_json_is_read_strictly(text: str | bytes, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        parse_json(text, "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [1]\nb: *x\n", "aliases aren't read"),
        ("a: 1\na: 2\n", "a key comes twice"),
        ("!!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("[" * 5000, "nested too deeply"),
        ("- " * 5000, "nested too deeply"),
        ("x" * 300_000, "the limit for YAML is 65536"),
        ("? [a]\n: 1\n", "is not plain YAML"),
    ],
)
def test_yaml_is_read_strictly(text: str, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        parse_yaml(text.encode(), "x")


def test_yaml_keeps_dates_as_text() -> None:
    assert parse_yaml(b"a: 2024-05-01\nb: 2024-05-01T10:00:00Z\n", "x") == {"a": "2024-05-01", "b": "2024-05-01T10:00:00Z"}


def test_rows_of_every_kind_of_file(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": "ü"}]
    lines = "\n".join(map(json.dumps, rows)).encode()
    for name, data in {
        "a.jsonl": lines + b"\n\n",
        "b.json": json.dumps(rows).encode(),
        "c.jsonl.gz": gzip.compress(lines),
        "d.json.zst": zstandard.compress(json.dumps(rows).encode()),
    }.items():
        (tmp_path / name).write_bytes(data)
        assert list(read_rows(tmp_path / name)) == rows
    (tmp_path / "e.json").write_text("[1]")
    with pytest.raises(TaskError, match="row 0 is a int, expected an object"):
        list(read_rows(tmp_path / "e.json"))
    os.mkfifo(tmp_path / "f.json")
    with pytest.raises(TaskError, match="not a regular file"):
        list(read_rows(tmp_path / "f.json"))
