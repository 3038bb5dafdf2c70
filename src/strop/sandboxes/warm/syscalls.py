"""Linux system calls that the standard library lacks, through ctypes. Standard library only (runs inside the box's interpreter)."""

import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 22, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
# What the outer bubblewrap leaves in the bounding set: CHOWN, DAC_OVERRIDE, FOWNER, SETPCAP, SYS_ADMIN, SYS_RESOURCE (SETPCAP
# last, it permits the rest).
CAPABILITIES = (0, 1, 3, 21, 24, 8)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]
_libc.sethostname.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (or, for CLONE_NEWPID, its next child) into new namespaces."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Join the namespace behind ``fd``."""
    _check(_libc.setns(fd, kind), "setns")


def set_hostname(name: str) -> None:
    """sethostname(2), for this process's UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2); ``kind`` may be empty for bind mounts and remounts."""
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None),
        f"mount {kind or 'bind'} at {target}",
    )


def bind(source: str, target: str, *, read_only: bool, nodev: bool = True) -> None:
    """Bind ``source`` at ``target``, never honouring setuid."""
    mount(source, target, "", MS_BIND)
    flags = MS_BIND | MS_REMOUNT | MS_NOSUID | (MS_RDONLY if read_only else 0) | (MS_NODEV if nodev else 0)
    mount("", target, "", flags)


def detach(target: str) -> None:
    """Take a mount and everything under it out of this mount namespace."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def prctl(option: int, a: int = 0, b: int = 0) -> None:
    """prctl(2)."""
    _check(_libc.prctl(option, a, b, 0, 0), f"prctl({option})")


def drop_capabilities() -> None:
    """Give up every capability for good: bounding, ambient and own sets; then forbid new privileges."""
    for capability in CAPABILITIES:
        prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


# Doors that no namespace of the box closes: kernel keyrings and foreign socket families (vsock reaches a virtual machine's host)
# would let boxes talk to each other or to the outside; the rest is kernel attack surface that tests and tools never need.
# Order: add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, io_uring_setup, io_uring_enter, io_uring_register.
_FILTERS = {
    "x86_64": {"arch": 0xC000003E, "socket": 41, "ptrace": 101, "denied": (248, 249, 250, 298, 321, 323, 425, 426, 427)},
    "aarch64": {"arch": 0xC00000B7, "socket": 198, "ptrace": 117, "denied": (217, 218, 219, 241, 280, 282, 425, 426, 427)},
}
_SOCKET_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
_EPERM, _EAFNOSUPPORT = 1, 97


def filter_supported() -> bool:
    """Whether the system call filter knows this processor."""
    return platform.machine() in _FILTERS


def _build_filter(*, denies_ptrace: bool) -> bytes:
    """Classic BPF program: errno for the denied calls and socket families, everything else allowed."""
    table = _FILTERS[platform.machine()]
    denied = (*table["denied"], table["ptrace"]) if denies_ptrace else table["denied"]
    load, jump_equal, jump_ge, ret = 0x20, 0x15, 0x35, 0x06
    allow, errno = 0x7FFF0000, 0x00050000
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, table["arch"]), (ret, 0, 0, errno | _EPERM), (load, 0, 0, 0)]
    program += [(jump_ge, 0, 1, 0x40000000), (ret, 0, 0, errno | _EPERM)]
    for number in denied:
        program += [(jump_equal, 0, 1, number), (ret, 0, 0, errno | _EPERM)]
    program += [(jump_equal, 1, 0, table["socket"]), (ret, 0, 0, allow), (load, 0, 0, 16)]
    for family in _SOCKET_FAMILIES:
        program += [(jump_equal, 0, 1, family), (ret, 0, 0, allow)]
    program += [(ret, 0, 0, errno | _EAFNOSUPPORT)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def _program(*, denies_ptrace: bool) -> _Program:
    program = _build_filter(denies_ptrace=denies_ptrace)
    code = ctypes.create_string_buffer(program, len(program))
    held = _Program(len(program) // 8, ctypes.addressof(code))
    held.code = code  # pyright: ignore[reportAttributeAccessIssue]  # its memory lives as long as what points to it
    return held


_programs = {denies: _program(denies_ptrace=denies) for denies in (False, True)} if filter_supported() else {}


def install_filter(*, denies_ptrace: bool) -> None:
    """Install the system call filter (needs no_new_privs); does nothing on a processor it doesn't know.

    ``denies_ptrace`` is for processes that are process 1 of a box: a tracer could kill it in a way that no signal from inside can
    (``PTRACE_O_EXITKILL``), and the run would look as if the machinery had lost it.
    """
    if denies_ptrace in _programs:
        prctl(PR_SET_SECCOMP, 2, ctypes.addressof(_programs[denies_ptrace]))
