"""The system call filter of a container: what docker's own profile keeps from a container without capabilities, and a few more doors.

Docker's profile can't be extended through its interface, only replaced; so this one lists what is refused. Names that a machine's
libseccomp doesn't know are skipped by the runtime.
"""

from __future__ import annotations

import json
import platform
from typing import Any

_REFUSED = """
    acct add_key bpf chroot clock_adjtime clock_adjtime64 clock_settime clock_settime64 create_module delete_module finit_module fsconfig
    fsmount fsopen fspick get_kernel_syms init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load
    kexec_load keyctl lookup_dcookie mbind migrate_pages mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl
    open_by_handle_at open_tree perf_event_open pivot_root process_madvise process_vm_readv process_vm_writev query_module quotactl
    quotactl_fd reboot request_key set_mempolicy setdomainname sethostname setns settimeofday stime swapoff swapon sysfs syslog _sysctl
    umount umount2 unshare uselib userfaultfd ustat vhangup vm86 vm86old
"""
# Every flag that makes a namespace.
_NAMESPACE_FLAGS = 0x7E020000
_ENOSYS, _EAFNOSUPPORT = 38, 97
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink: as in the bubblewrap back end
_LAST_FAMILY = 45


def profile() -> str:
    """The filter in docker's form."""
    rules: list[dict[str, Any]] = [{"names": _REFUSED.split(), "action": "SCMP_ACT_ERRNO"}]
    rules.append(
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ERRNO",
            # Refused when any of the flags is set: one rule a flag, because a comparison is for equality.
            "args": [
                {"index": 0, "value": 1 << bit, "valueTwo": 1 << bit, "op": "SCMP_CMP_MASKED_EQ"}
                for bit in range(32)
                if _NAMESPACE_FLAGS >> bit & 1
            ],
        }
    )
    # Its flags are behind a pointer, where a filter can't look; programs fall back to clone.
    rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS})
    families = [family for family in range(_LAST_FAMILY + 1) if family not in _FAMILIES]
    rules.append(
        {
            "names": ["socket"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": _EAFNOSUPPORT,
            "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"} for family in families],
        }
    )
    architectures = _ARCHITECTURES.get(platform.machine(), [])
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "architectures": architectures, "syscalls": rules})


# Only this machine's: the runtime translates the filter for each of them, for every command.
_ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}
