"""The static probes, as a program that runs in a box and prints one JSON object. Standard library only, any Python from 3.8.

Every answer is a text, a number or a list of short texts, cut to size here so that the whole fits into what a box may print; a probe that
fails answers with the name of its error, which tells boxes apart as well.
"""

import json
import os
import platform
import resource
import shutil
import socket
import sys
import time

TOOLS = """
    apt-get bash bwrap bzip2 cargo cc clang cmake conda curl dig docker ed find gcc gdb git go htop ip java jq less ltrace
    make mount nano node npm nproc openssl patch perl pip pip3 ps pytest python python3 rsync ruby rustc screen ssh strace
    sudo systemctl tar tmux top tree uv vi vim wget xz yum zip
"""


def lines(path, limit=20_000):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(limit).splitlines()


def mounts():
    found = [line.split() for line in lines("/proc/self/mounts")]
    return [f"{row[1]}:{row[2]}" for row in found if len(row) > 3][:40]


def status(*names):
    rows = dict(line.split(":", 1) for line in lines("/proc/self/status") if ":" in line)
    return [f"{name}={rows.get(name, '').strip()}" for name in names]


def first(path):
    return lines(path)[0] if lines(path) else ""


def packages():
    from importlib import metadata

    return sorted({f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions()})[:60]


def git_facts():
    root = ".git"
    if not os.path.exists(root):
        return ["no repository"]
    logs = lines(f"{root}/logs/HEAD") if os.path.exists(f"{root}/logs/HEAD") else []
    authors = sorted({line.split("<")[-1].split(">")[0] for line in logs})
    config = lines(f"{root}/config") if os.path.exists(f"{root}/config") else []
    remotes = [line.strip() for line in config if line.strip().startswith(("url", "[remote"))]
    return [f"reflog={min(len(logs), 100)}", f"shallow={os.path.exists(root + '/shallow')}", *authors[:5], *remotes[:6]]


def dot_files():
    places = (os.path.expanduser("~"), ".")
    return sorted(
        {f"{'home' if at == 0 else 'work'}:{name}" for at, place in enumerate(places) for name in os.listdir(place) if name[0] == "."}
    )[:40]


def network():
    found = [f"if:{name}" for _, name in socket.if_nameindex()][:10]
    routes = lines("/proc/net/route") if os.path.exists("/proc/net/route") else []
    found.append("default route" if any(row.split()[1:2] == ["00000000"] for row in routes) else "no default route")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address; a datagram socket sends nothing when it connects
            found.append("route out")
        except OSError as error:
            found.append(f"out:{error.errno}")
    return found


def dns():
    return (
        [line for line in lines("/etc/resolv.conf") if line.startswith(("nameserver", "search"))][:6]
        if os.path.exists("/etc/resolv.conf")
        else ["none"]
    )


def limits():
    names = ("NOFILE", "NPROC", "FSIZE", "AS", "CORE", "STACK", "CPU")
    return [f"{name}={resource.getrlimit(getattr(resource, 'RLIMIT_' + name))[0]}" for name in names]


def processes():
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and len(found) < 20:
            try:
                found.append(first(f"/proc/{name}/comm"))
            except OSError:
                continue
    return sorted(found)


def memory_mb():
    return round(int(first("/proc/meminfo").split()[1]) / 1024)


def cgroup():
    """Paths of control groups, only with the words that a kind of box has in them: the rest names one box or one daemon, not a kind."""
    known = (
        "docker",
        "kubepods",
        "system.slice",
        "user.slice",
        "machine.slice",
        "init.scope",
        "lxc",
        "containerd",
        "podman",
        "libpod",
        "strop",
    )
    found = set()
    for line in lines("/proc/self/cgroup"):
        parts = line.split(":", 2)[-1].strip("/").split("/")
        found.add("/" + "/".join(next((word for word in known if part.startswith(word)), "*") for part in parts if part))
    return sorted(found)[:12]


def disk_mb():
    info = os.statvfs(".")
    return round(info.f_blocks * info.f_frsize / (1 << 20))


def user():
    import pwd

    return [pwd.getpwuid(os.getuid()).pw_name, f"uid={os.getuid()}", f"groups={len(os.getgroups())}"]


PROBES = {
    "hostname": socket.gethostname,
    "hostname_file": lambda: first("/etc/hostname"),
    "hosts_file": lambda: lines("/etc/hosts")[:10],
    "path": os.getcwd,
    "home": lambda: os.path.expanduser("~"),
    "user": user,
    "variables": lambda: sorted(os.environ)[:60],
    "variable_values": lambda: [f"{name}={value}" for name, value in sorted(os.environ.items())][:60],
    "search_path": lambda: os.environ.get("PATH", "").split(":")[:20],
    "shell": lambda: os.environ.get("SHELL", "none"),
    "container_files": lambda: [
        path for path in ("/.dockerenv", "/run/.containerenv", "/.strop-warden", "/run/secrets") if os.path.exists(path)
    ],
    "cgroup": cgroup,
    "mounts": mounts,
    "root": lambda: sorted(os.listdir("/"))[:40],
    "uptime_s": lambda: float(first("/proc/uptime").split()[0]),
    "boot_id": lambda: first("/proc/sys/kernel/random/boot_id"),
    "clock_s": time.time,
    "time_zone": lambda: list(time.tzname),
    "locale": lambda: [os.environ.get("LANG", ""), os.environ.get("LC_ALL", ""), sys.getfilesystemencoding(), sys.stdout.encoding or ""],
    "cpus": lambda: [f"count={os.cpu_count()}", f"allowed={len(os.sched_getaffinity(0))}"],
    "memory_mb": memory_mb,
    "disk_mb": disk_mb,
    "kernel": lambda: [platform.release(), platform.machine()],
    "system": lambda: lines("/etc/os-release")[:4] if os.path.exists("/etc/os-release") else ["no os-release"],
    "python": lambda: [
        platform.python_version(),
        sys.executable,
        f"isolated={sys.flags.isolated}",
        f"venv={sys.prefix != sys.base_prefix}",
    ],
    "packages": packages,
    "tools": lambda: [name for name in TOOLS.split() if shutil.which(name)],
    "git": git_facts,
    "dot_files": dot_files,
    "network": network,
    "dns": dns,
    "limits": limits,
    "processes": processes,
    "own_pid": os.getpid,
    "privileges": lambda: status("NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "Groups"),
    "load": lambda: float(first("/proc/loadavg").split()[0]),
    "temporary_files": lambda: len(os.listdir("/tmp")),
    "devices": lambda: sorted(os.listdir("/dev"))[:30],
    "umask": lambda: f"{os.umask(0o022):03o}",
    "terminal": lambda: [str(os.isatty(fd)) for fd in range(3)],
}


def short(value):
    if isinstance(value, (list, tuple)):
        return [str(item)[:70] for item in value]
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)[:120]


def main():
    wanted = sys.argv[1:]
    answers = {}
    for name in wanted:
        try:
            answers[name] = short(PROBES[name]())
        except Exception as error:  # an answer too: boxes differ in what fails
            answers[name] = [f"{type(error).__name__}: {getattr(error, 'errno', '')}"]
    text = json.dumps(answers)
    sys.stdout.write(f"{len(text)}\n{text}\n")


if __name__ == "__main__":
    main()
