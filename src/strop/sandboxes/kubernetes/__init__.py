"""The kubernetes back end: one pod of a cluster per box. **Not run here**: no cluster was at hand, so no check of the conformance suite has
seen it. The parts that need no cluster (manifests, archives, what a pod's tree differs in) are tested.

The pod's first process and the one that reports wait statuses are those of the docker back end, mounted from a config map. Files travel as
archives through ``tar`` in the pod, which runs as the box's user; the host only reads them, and compares.
"""

from strop.sandboxes.kubernetes.provider import KubernetesProvider

__all__ = ["KubernetesProvider"]
