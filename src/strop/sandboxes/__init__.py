"""Boxes for agent code: the embedded bubblewrap back end, its host check and the conformance suite for every back end."""

from strop.sandboxes.bubblewrap import BubblewrapProvider, BubblewrapSandbox, IsolatedResult
from strop.sandboxes.host import Requirement, check_host

__all__ = ["BubblewrapProvider", "BubblewrapSandbox", "IsolatedResult", "Requirement", "check_host"]
