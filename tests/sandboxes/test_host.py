"""The host check names what is missing, what is lost, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.sandboxes.host import check_host


def _prepend_fake_bwrap(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    fake = directory / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_every_requirement_is_complete() -> None:
    for requirement in check_host():
        assert requirement.detail
        assert bool(requirement.lost) == bool(requirement.fix) == (not requirement.ok)


def test_missing_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (only,) = check_host()
    assert (only.name, only.ok, only.is_required) == ("bubblewrap", False, True)
    assert "install" in only.fix


REFUSED = "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1"


@pytest.mark.parametrize(
    ("is_root", "switches", "fix"),
    [
        (False, {"kernel/apparmor_restrict_unprivileged_userns": "1"}, "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
        (False, {"kernel/unprivileged_userns_clone": "0"}, "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        (False, {"user/max_user_namespaces": "0"}, "sudo sysctl -w user.max_user_namespaces=15000"),
        (True, {"user/max_user_namespaces": "0", "kernel/unprivileged_userns_clone": "0"}, "sysctl -w user.max_user_namespaces=15000"),
    ],
)
def test_namespaces_that_are_switched_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_root: bool, switches: dict[str, str], fix: str
) -> None:
    _prepend_fake_bwrap(monkeypatch, tmp_path, REFUSED)
    monkeypatch.setattr("strop.sandboxes.host._sysctl", lambda name: switches.get(name, ""))
    monkeypatch.setattr("strop.sandboxes.host._is_root", lambda: is_root)
    found = {requirement.name: requirement for requirement in check_host()}["user namespaces"]
    assert not found.ok
    assert found.is_required
    assert found.fix == fix
    assert found.detail.startswith("user namespaces are switched off on this machine (")
    assert "uid map" in found.detail


@pytest.mark.parametrize("switches", [{}, {"kernel/unprivileged_userns_clone": "0"}])
def test_namespaces_refused_for_another_reason_are_not_called_switched_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switches: dict[str, str]
) -> None:
    """For root the switches of unprivileged users mean nothing."""
    _prepend_fake_bwrap(monkeypatch, tmp_path, REFUSED)
    monkeypatch.setattr("strop.sandboxes.host._sysctl", lambda name: switches.get(name, ""))
    monkeypatch.setattr("strop.sandboxes.host._is_root", lambda: True)
    found = {requirement.name: requirement for requirement in check_host()}["user namespaces"]
    assert found.detail == "bwrap: setting up uid map: Permission denied"
    assert "sysctl" not in found.fix


def test_old_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = '{"overlay": "Operation not permitted", "tmpfs_xattr": "Operation not supported", "filter": ""}'
    _prepend_fake_bwrap(monkeypatch, tmp_path, f"echo '{answer}'")
    monkeypatch.setattr("strop.sandboxes.host._kernel", lambda: (5, 10))
    found = {requirement.name: requirement for requirement in check_host()}
    assert not found["overlayfs"].ok
    assert "5.11" in found["overlayfs"].fix
    assert not found["disk limit"].ok
    assert not found["disk limit"].is_required


def test_no_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.sandboxes.cgroups.find_hierarchies", lambda: {})
    monkeypatch.setattr("strop.sandboxes.host._is_root", lambda: False)
    found = {requirement.name: requirement for requirement in check_host() if requirement.name.startswith("control")}
    assert {requirement.fix for requirement in found.values()} == {"systemd-run --user --scope -p Delegate=yes strop ..."}
