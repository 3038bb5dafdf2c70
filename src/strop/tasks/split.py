"""The split of modules into training and held-out code: a pure hash, so that every user of the sources agrees on it."""

from __future__ import annotations

import hashlib

HELDOUT_PERCENT = 20
"""Share of the modules that no training of any kind may see, in percent."""


def split_of(package: str, module: str) -> str:
    """Return the split of a module.

    Args:
        package: Distribution name as in the source table (``"boltons"``), or ``"stdlib"``.
        module: Dotted path of the module without file extension; a package's ``__init__`` is the package itself (``"boltons.strutils"``).

    Returns:
        ``"train"`` or ``"heldout"`` (about one module in five). It depends on the two names alone.
    """
    digest = hashlib.blake2b(f"{package}/{module}".encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % 100 < HELDOUT_PERCENT else "train"


def module_of(path: str) -> str:
    """Return the dotted module name of a source path: ``"boltons/strutils.py"`` -> ``"boltons.strutils"``."""
    dotted = path.removesuffix(".py").replace("/", ".")
    return dotted.removesuffix(".__init__")
