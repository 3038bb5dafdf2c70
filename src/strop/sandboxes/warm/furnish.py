"""What the warm parent adds to the outer bubblewrap's file system once, before any run. Standard library only."""

# pyright: reportMissingImports=false

import os
import shutil

import isolate
import syscalls as sc

_HOST_ETC = f"{isolate.HOST}/etc"
_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/tmp:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "hostname": "box\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_DEVICES = ("null", "zero", "full", "random", "urandom")


def furnish(name_server: str = "") -> None:
    """A neutral /etc with the host's links to commands and libraries; device nodes that can be used but not changed.

    Args:
        name_server: Address of the name server of a box with a way out.
    """
    files = dict(_FILES)
    if name_server:
        files["resolv.conf"] = f"nameserver {name_server}\n"
        files["nsswitch.conf"] = files["nsswitch.conf"].replace("hosts: files", "hosts: files dns")
    for name, text in files.items():
        with open(f"/etc/{name}", "w") as file:
            file.write(text)
    if os.path.isdir(f"{_HOST_ETC}/alternatives"):
        os.mkdir("/etc/alternatives")
        for entry in os.scandir(f"{_HOST_ETC}/alternatives"):
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), f"/etc/alternatives/{entry.name}")
    if os.path.isfile(f"{_HOST_ETC}/ld.so.cache"):
        shutil.copyfile(f"{_HOST_ETC}/ld.so.cache", "/etc/ld.so.cache")
    sc.mount("", "/etc", "", sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV)
    for name in _DEVICES:
        # A box started by root could otherwise change the mode of the host's device node; bubblewrap's own remount would forbid using it.
        sc.mount("", f"/dev/{name}", "", sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | sc.MS_NOSUID)
