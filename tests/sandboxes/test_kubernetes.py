"""The parts of the kubernetes back end that need no cluster. No cluster was at hand: nothing here shows that a pod works."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from test_archive import STEPS, apply, fresh

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.sandboxes.conformance import make_base
from strop.sandboxes.kubernetes import KubernetesProvider, manifests
from strop.sandboxes.kubernetes.tree import archive_of, archive_of_file, differences
from strop.sandboxes.layer import BaseTree


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_what_a_pod_holds_comes_back_as_the_same_changes(steps: list) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tree = BaseTree.scan(str(make_base(root)))
        one, other = fresh(tree, root, "one"), fresh(tree, root, "other")
        apply(one, steps)
        assert differences(other, archive_of(tree, one)) == 0
        assert other.changes() == one.changes()
        assert other.list_files() == one.list_files()
        for layer in (one, other):
            layer.close()
        os.close(tree.fd)


def hostile_archive() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, kind, target in (
            ("../outside", tarfile.REGTYPE, ""),
            ("/etc/absolute", tarfile.REGTYPE, ""),
            ("link", tarfile.SYMTYPE, "/etc"),
            ("link/passwd", tarfile.REGTYPE, ""),
            ("device", tarfile.BLKTYPE, ""),
            ("hard", tarfile.LNKTYPE, "../../etc/passwd"),
            ("orphan/file", tarfile.REGTYPE, ""),
            ("good", tarfile.REGTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, target, 0o6755
            tar.addfile(info, io.BytesIO(b""))
    return data.getvalue()


def test_a_hostile_archive_stays_in_the_layer(tmp_path: Path) -> None:
    tree = BaseTree.scan(str(make_base(tmp_path)))
    layer = fresh(tree, tmp_path, "one")
    assert differences(layer, hostile_archive()) == 6
    assert not (tmp_path / "outside").exists()
    assert {path for path, entry in layer.index.items() if entry.kind == "file"} <= {"good"}
    assert all((layer.directory / path).lstat().st_mode & 0o6000 == 0 for path in layer.index)


@pytest.mark.parametrize("data", [b"", b"x" * 2000, hostile_archive()[:700]])
def test_what_is_not_an_archive_is_a_clear_error(tmp_path: Path, data: bytes) -> None:
    tree = BaseTree.scan(str(make_base(tmp_path)))
    with pytest.raises(SandboxError, match="can't be read"):
        differences(fresh(tree, tmp_path, "one"), data)


def test_one_file_with_its_directories() -> None:
    with tarfile.open(fileobj=io.BytesIO(archive_of_file("a/b/c", b"x", 0o755, ["a", "a/b"]))) as tar:
        assert [(info.name, info.isdir(), info.mode) for info in tar] == [("a", True, 0o755), ("a/b", True, 0o755), ("a/b/c", False, 0o755)]


def test_a_pod_asks_for_no_privilege(tmp_path: Path) -> None:
    helper = tmp_path / "warden"
    helper.write_bytes(b"program")
    config_map = manifests.warden_map(helper)
    pod = manifests.pod("strop-1", "image:1", config_map["metadata"]["name"], SandboxConfig(memory_mb=96, disk_mb=8), "owner")
    spec, (box,) = pod["spec"], pod["spec"]["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert (box["securityContext"]["allowPrivilegeEscalation"], box["securityContext"]["readOnlyRootFilesystem"]) == (False, True)
    assert (box["stdin"], box["stdinOnce"], spec["restartPolicy"]) == (True, True, "Never")
    assert box["resources"]["limits"]["memory"] == "96Mi"
    assert {volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if "emptyDir" in volume} == {"8Mi"}
    assert manifests.network_policy()["spec"]["egress"] == []


def test_an_image_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STROP_KUBERNETES_IMAGE", raising=False)
    with pytest.raises(SandboxError, match="STROP_KUBERNETES_IMAGE"):
        KubernetesProvider(SandboxConfig())
