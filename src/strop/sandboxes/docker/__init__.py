"""The docker back end: one container of a real daemon per box, over a workspace that the host mounts.

The container's first process (``warden.c``) only reaps orphans and lives as long as strop holds its stdin; commands are ``docker exec``
processes beside it. After each command the host kills whatever is left of it by the container's control group. strop must run as root
on the daemon's own machine, because evidence, clean-up and the workspace go through control groups and mounts, not through the daemon.
"""

from strop.sandboxes.docker.provider import DockerProvider

__all__ = ["DockerProvider"]
