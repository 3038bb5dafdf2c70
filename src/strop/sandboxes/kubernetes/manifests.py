"""What strop asks a cluster for."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.sandboxes.outer import AGENT_UID, ENVIRONMENT

APP = "strop-box"
WARDEN = "/strop/warden"
LIFETIME_S = 6 * 3600
"""A pod ends then whatever happens; one whose strop is gone ends long before, with its stdin."""


def warden_map(warden: Path) -> dict[str, Any]:
    """The config map that holds the helper; named after its content, so that every strop shares it and nobody needs to remove it."""
    data = warden.read_bytes()
    return {
        "metadata": {"name": f"strop-warden-{hashlib.sha256(data).hexdigest()[:12]}", "labels": {"app": APP}},
        "binaryData": {"warden": base64.b64encode(data).decode()},
        "immutable": True,
    }


def network_policy() -> dict[str, Any]:
    """Nothing in, nothing out, for every box of the namespace; a cluster's network plug-in decides whether it holds."""
    return {
        "metadata": {"name": "strop-no-network"},
        "spec": {"podSelector": {"matchLabels": {"app": APP}}, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": []},
    }


def pod(name: str, image: str, config_map: str, config: SandboxConfig, owner: str) -> dict[str, Any]:
    """A box's pod: no privilege, no token, a read-only root, its writable places in memory and limited."""
    memory, disk = f"{config.memory_mb}Mi", f"{config.disk_mb}Mi"
    places = {"workspace": "/workspace", "tmp": "/tmp", "shm": "/dev/shm"}
    container = {
        "name": "box",
        "image": image,
        "command": [WARDEN, "init"],
        "stdin": True,
        "stdinOnce": True,
        "workingDir": "/workspace",
        "env": [{"name": key, "value": value} for key, value in ENVIRONMENT.items()],
        "resources": {"limits": {"memory": memory, "cpu": "1"}, "requests": {"memory": memory, "cpu": "100m"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            *({"name": key, "mountPath": path} for key, path in places.items()),
            {"name": "strop", "mountPath": "/strop", "readOnly": True},
        ],
    }
    return {
        "metadata": {"name": name, "labels": {"app": APP}, "annotations": {"strop/owner": owner}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIFETIME_S,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "box",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": AGENT_UID,
                "runAsGroup": AGENT_UID,
                "fsGroup": AGENT_UID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                *({"name": key, "emptyDir": {"medium": "Memory", "sizeLimit": disk}} for key in places),
                {"name": "strop", "configMap": {"name": config_map, "defaultMode": 0o555}},
            ],
        },
    }
