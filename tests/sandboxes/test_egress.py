"""The gateway's readers of hostile bytes, its list, and, as root, a real package install through it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import SandboxError
from strop.ports import Egress
from strop.sandboxes.egress import Networks, dns
from strop.sandboxes.egress.http import is_sensitive, read_request
from strop.sandboxes.egress.policy import AllowList, is_reachable_address
from strop.sandboxes.egress.tls import NeedMore, server_name

SCENARIO = Path(__file__).with_name("egress_scenario.py")


# ------------------------------------------------------------------------------------------------ the list


def test_names_and_ports_of_the_list() -> None:
    allowed = AllowList(("files.example", "*.mirror.example", "git.example:9418"))
    assert allowed.ports == [80, 443, 9418]
    assert allowed.allows("FILES.example.", 443)
    assert allowed.allows("a.b.mirror.example", 80)
    assert allowed.allows("git.example", 9418)
    for name, port in (
        ("mirror.example", 443),
        ("evilmirror.example", 443),
        ("files.example.evil", 443),
        ("xfiles.example", 443),
        ("files.example", 22),
        ("git.example", 443),
        ("", 443),
    ):
        assert not allowed.allows(name, port), name


@pytest.mark.parametrize("host", ["", "*", "10.0.0.1", "::1", "a b", "x:0", "x:99999", "x:y", "http://x", "*.*.x", "1.2.3", "x/y", "-x"])
def test_what_is_not_a_name_is_refused(host: str) -> None:
    with pytest.raises(SandboxError, match="allow-list entry"):
        AllowList((host,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "allow"}, "Did you mean 'allowlist'"),
        ({"mode": "allowlist"}, "needs some"),
        ({"mode": "none", "hosts": ("x",)}, "only 'allowlist' takes hosts"),
    ],
)
def test_egress_says_what_is_wrong(arguments: dict, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        Egress(**arguments)


def test_a_missing_mode_is_refused_with_its_reason() -> None:
    networks = Networks()
    assert networks.check(None) is None
    assert networks.check(Egress()) is None
    with pytest.raises(SandboxError, match="'public' can't be had"):
        networks.check(Egress(mode="public"))
    networks.missing["egress_allowlist"] = "no such luck"
    assert networks.modes == ("none",)
    with pytest.raises(SandboxError, match="no such luck"):
        networks.check(Egress(mode="allowlist", hosts=("x.example",)))


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "::1", "fe80::1%eth0", "::ffff:127.0.0.1"])
def test_an_allowed_name_can_not_lead_to_this_machine(address: str) -> None:
    assert not is_reachable_address(address)
    assert is_reachable_address("203.0.113.10")


# ------------------------------------------------------------------------------------------------ TLS


def client_hello(name: str | None) -> bytes:
    """What the standard library's own client sends first."""
    context = ssl.create_default_context()
    if name is None:
        context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def test_the_server_name_of_a_real_client() -> None:
    hello = client_hello("files.example")
    assert server_name(hello) == "files.example"
    for size in range(len(hello)):
        with pytest.raises(NeedMore):
            server_name(hello[:size])
    body, split = hello[5:], len(hello) // 2
    records = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in (body[:split], body[split:]))
    assert server_name(records) == "files.example"


def test_a_hello_without_a_name_or_with_a_hidden_one_is_refused() -> None:
    with pytest.raises(ValueError, match="0 server names"):
        server_name(client_hello(None))
    hidden = client_hello("files.example").replace(b"\x00\x17\x00\x00", b"\xfe\x0d\x00\x00", 1)  # extended master secret becomes ECH
    with pytest.raises(ValueError, match="hides its true name"):
        server_name(hidden)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300), prefix=st.sampled_from([b"", b"\x16\x03\x01\x00\x40\x01\x00\x00\x3c\x03\x03"]))
def test_any_bytes_are_a_name_or_refused(data: bytes, prefix: bytes) -> None:
    with contextlib.suppress(NeedMore, ValueError):
        assert isinstance(server_name(prefix + data), str)


# ------------------------------------------------------------------------------------------------ HTTP


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_a_request_goes_on_without_what_is_sensitive() -> None:
    request = read_request(
        head(
            "POST http://files.example/a?b HTTP/1.1",
            "Host: files.example",
            "Authorization: Basic x",
            "cookie: a",
            "X-Api-Key: k",
            "PRIVATE-TOKEN: t",
            "X-Amz-Security-Token: t",
            "Accept: text/html",
            "Author: me",
            "Connection: keep-alive, X-Secret",
            "Content-Length: 3",
        )
    )
    assert (request.host, request.port, request.body_bytes) == ("files.example", None, 3)
    assert request.dropped == ("authorization", "cookie", "x-api-key", "private-token", "x-amz-security-token")
    sent = "POST /a?b HTTP/1.1\r\nHost: files.example\r\nAccept: text/html\r\nAuthor: me\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
    assert request.head == sent.encode()


@pytest.mark.parametrize(
    "lines",
    [
        ("GET / HTTP/1.1",),
        ("GET / HTTP/1.1", "Host: a", "Host: b"),
        ("GET / HTTP/1.1", "Host : a"),
        ("GET / HTTP/1.1", "Host: a", " folded: b"),
        ("GET / HTTP/1.1", "Host: a", "X: b\nHost: c"),
        ("GET / HTTP/1.1", "Host: a", "Content-Length: 1", "Transfer-Encoding: chunked"),
        ("GET / HTTP/1.1", "Host: a", "Content-Length: 1", "Content-Length: 2"),
        ("GET / HTTP/1.1", "Host: a", "Content-Length: +1"),
        ("GET / HTTP/1.1", "Host: a", "Transfer-Encoding: gzip, chunked"),
        ("GET http://b/ HTTP/1.1", "Host: a"),
        ("GET http://u@a/ HTTP/1.1", "Host: a"),
        ("GET ftp://a/ HTTP/1.1", "Host: a"),
        ("CONNECT a:443 HTTP/1.1", "Host: a"),
        ("GET / HTTP/2", "Host: a"),
        ("GET  / HTTP/1.1", "Host: a"),
        ("GET / HTTP/1.1", "Host: a:x"),
        ("GET / HTTP/1.1", "Host:"),
        ("PRI * HTTP/2.0",),
    ],
)
def test_ambiguous_requests_are_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_request(head(*lines))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_one_request_or_refused(data: bytes) -> None:
    try:
        request = read_request(b"GET / HTTP/1.1\r\nHost: a\r\n" + data + b"\r\n\r\n")
    except ValueError:
        return
    assert request.head.count(b"\r\n\r\n") == 1
    assert request.host == "a"
    assert not any(is_sensitive(line.partition(b":")[0].decode()) for line in request.head.split(b"\r\n")[1:])


# ------------------------------------------------------------------------------------------------ names


def question(name: str, kind: int = dns.A) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".") if part)
    return b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\x00" + kind.to_bytes(2, "big") + b"\x00\x01"


def test_questions_and_answers() -> None:
    message = question("files.example")
    assert dns.read_question(message) == ("files.example", dns.A, dns.IN)
    answer = dns.answer(message, ["203.0.113.10"])
    assert (answer[:2], answer[2:4], answer[6:8], answer[-4:]) == (b"\x12\x34", b"\x81\x80", b"\x00\x01", bytes([203, 0, 113, 10]))
    refused = dns.answer(message, ["203.0.113.10"], dns.REFUSED)
    assert (refused[3] & 15, refused[6:8]) == (dns.REFUSED, b"\x00\x00")


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=100))
def test_any_message_is_a_question_or_not(data: bytes) -> None:
    try:
        dns.read_question(data)
    except dns.BadQuestion:
        return
    assert dns.answer(data, [])[:2] == data[:2]


# ------------------------------------------------------------------------------------------------ the whole


def check_scenario(spec: str) -> None:
    """Run the scenario in a network namespace of its own and check everything that it saw."""
    command = ["unshare", "--net", sys.executable, str(SCENARIO), spec]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["pip"][0] == 0, found["pip"]
    assert found["imported"] == "42\n"
    attempts = found["attempts"]
    assert attempts["proxy_variables"] == []
    assert (attempts["allowed_http"], attempts["allowed_tls"], attempts["second_request"]) == ("hello", "HTTP/1.1 200", "HTTP/1.1 200 OK")
    assert attempts["other_name"] == "gaierror"
    assert attempts["other_port"] == "ConnectionRefusedError"
    assert attempts["other_host_header"] == attempts["link_local"] == "HTTPError"
    assert attempts["other_server_name"] in ("SSLEOFError", "SSLError", "ConnectionResetError")
    assert attempts["no_server_name"] in ("", "ConnectionResetError")
    assert attempts["address_only"].startswith("HTTP/1.1 403")
    assert (found["fork"], found["none"]) == ("b'hello'\n", "unreachable\n")
    paths = [seen["path"] for seen in found["seen"]]
    assert "/simple/demo-package/" in paths
    assert "/two" not in paths
    hello = next(seen for seen in found["seen"] if seen["path"] == "/hello")
    assert "x-plain" in hello["headers"]
    assert not {"authorization", "cookie", "x-api-key"} & set(hello["headers"])
    assert ["evil.test", 443, "not in the allow-list"] in found["events"]


def scenario_can_run() -> str:
    if os.geteuid() != 0:
        return "a network namespace of the test's own takes root"
    missing = [tool for tool in ("unshare", "ip", "openssl", "nsenter") if shutil.which(tool) is None]
    names = [line for line in Path("/etc/resolv.conf").read_text().splitlines() if line.startswith("nameserver") and ":" not in line]
    return f"{missing[0]} isn't installed" if missing else "" if names else "no name server with an IPv4 address is configured"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_package_installs_through_the_allow_list(usable_host: None) -> None:
    if reason := scenario_can_run():
        pytest.skip(reason)
    check_scenario("strop.sandboxes.bubblewrap:BubblewrapProvider")
