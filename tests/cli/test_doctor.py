"""What a machine lacks is said with the command that fixes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.cli import doctor
from strop.core.errors import SandboxError
from strop.model.native.build import missing_compiler_text


def requirement(**changes):
    from strop.sandboxes import Requirement

    values = {"name": "bubblewrap", "ok": True, "is_required": True, "detail": "found", "lost": "", "fix": ""}
    return Requirement(**(values | changes))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    def set_host(*requirements) -> None:
        monkeypatch.setattr("strop.sandboxes.check_host", lambda: list(requirements))

    return set_host


def test_a_whole_machine(host, capsys):
    host(requirement())
    assert doctor.print_report() == 0
    text = capsys.readouterr().out
    assert "nothing is missing" in text
    assert "ok       bubblewrap: found" in text


def test_no_bubblewrap(host, capsys):
    host(requirement(ok=False, detail="not on PATH", lost="all isolation", fix="apt-get install -y bubblewrap"))
    assert doctor.print_report() == 1
    text = capsys.readouterr().out
    assert "MISSING  bubblewrap" in text
    assert "fix:  apt-get install -y bubblewrap" in text
    with pytest.raises(SandboxError, match=r"can't isolate.*bubblewrap: not on PATH. Lost: all isolation. Fix: apt-get install"):
        doctor.check_sandbox()


def test_what_is_not_required_stops_nothing(host, capsys):
    host(requirement(name="control group memory", ok=False, is_required=False, lost="kernel evidence", fix="mount it"))
    doctor.check_sandbox()
    assert doctor.print_report() == 0
    assert "1 missing, 0 of them needed by every run" in capsys.readouterr().out


def test_a_missing_package_is_named(host, monkeypatch: pytest.MonkeyPatch, capsys):
    host()
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["no-such-package-anywhere>=2 ; python_version > '3'", "x; extra == 'dev'"]
    )
    assert doctor.print_report() == 1
    assert "-m pip install 'no-such-package-anywhere>=2'" in capsys.readouterr().out


def test_no_compiler_is_said_with_its_own_words(host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    host(requirement())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.print_report() == 1
    text = capsys.readouterr().out
    assert f"MISSING  C compiler: {missing_compiler_text()}" in text
    assert "no C compiler found (looked for $CC, cc, gcc, clang)" in text
    assert "apt-get install -y gcc libc6-dev" in text


def test_switched_off_namespaces_are_not_a_missing_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("strop.sandboxes.host._sysctl", lambda name: "0" if name == "user/max_user_namespaces" else "")
    assert doctor.print_report() == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"  ok       bubblewrap: {fake}" in lines
    (at,) = [number for number, line in enumerate(lines) if "MISSING  user namespaces: user namespaces are switched off" in line]
    assert lines[at + 2].strip().startswith("fix:")
    assert lines[at + 2].endswith("sysctl -w user.max_user_namespaces=15000")
    with pytest.raises(SandboxError, match=r"switched off on this machine \(user.max_user_namespaces = 0\).*Fix: .*sysctl -w"):
        doctor.check_sandbox()


def test_root_needs_no_sudo(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    assert doctor.install_command("gcc") == "sudo apt-get install -y gcc"
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    assert doctor.install_command("gcc") == "apt-get install -y gcc"
