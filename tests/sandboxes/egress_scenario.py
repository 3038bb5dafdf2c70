"""A program for ``unshare --net``: a package index and a name server in a namespace of their own, and boxes that may reach one name.

Usage: ``python egress_scenario.py MODULE:PROVIDER``; prints what happened as JSON. Nothing outside the namespace is touched or reachable.
"""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.ports import Egress
from strop.sandboxes.conformance import load_provider, make_base
from strop.sandboxes.egress import dns

ADDRESS = "203.0.113.10"
ALLOWED, OTHER = "packages.test", "evil.test"
WHEEL = "demo_package-1.0-py3-none-any.whl"
REQUESTS: list[dict[str, Any]] = []


def wheel() -> bytes:
    """A package with one module."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("demo_package.py", "ANSWER = 42\n")
        archive.writestr("demo_package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo-package\nVersion: 1.0\n")
        archive.writestr(
            "demo_package-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("demo_package-1.0.dist-info/RECORD", "demo_package.py,,\n")
    return data.getvalue()


class Index(http.server.BaseHTTPRequestHandler):
    """A package index in the simple form; remembers the headers of every request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def _answer(self) -> None:
        REQUESTS.append({"path": self.path, "headers": [name.lower() for name in self.headers]})
        body, kind = b"hello", "text/plain"
        if self.path == "/simple/demo-package/":
            body, kind = f'<a href="/files/{WHEEL}">{WHEEL}</a>'.encode(), "text/html"
        elif self.path == f"/files/{WHEEL}":
            body, kind = wheel(), "application/octet-stream"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(directory: Path) -> Path:
    """Start both servers and the name server; return the certificate."""
    server = next(line.split()[1] for line in Path("/etc/resolv.conf").read_text().splitlines() if line.startswith("nameserver"))
    for address in (ADDRESS, server):
        subprocess.run(["ip", "addr", "add", f"{address}/32", "dev", "lo"], check=False, capture_output=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    key, certificate = directory / "key.pem", directory / "cert.pem"
    names = f"subjectAltName=DNS:{ALLOWED},DNS:{OTHER}"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"]
    subprocess.run([*command, "-subj", "/CN=test", "-addext", names], check=True, capture_output=True)
    plain = http.server.ThreadingHTTPServer((ADDRESS, 80), Index)
    secure = http.server.ThreadingHTTPServer((ADDRESS, 443), Index)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    secure.socket = context.wrap_socket(secure.socket, server_side=True)
    other = http.server.ThreadingHTTPServer((ADDRESS, 8080), Index)
    for found in (plain, secure, other):
        threading.Thread(target=found.serve_forever, daemon=True).start()
    names_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names_socket.bind((server, 53))
    threading.Thread(target=answer_names, args=(names_socket,), daemon=True).start()
    return certificate


def answer_names(listener: socket.socket) -> None:
    """Every name below ``test`` has the one address."""
    while True:
        message, sender = listener.recvfrom(512)
        name, kind, _ = dns.read_question(message)
        addresses = [ADDRESS] if kind == dns.A and name.lower().endswith(".test") else []
        listener.sendto(dns.answer(message, addresses), sender)


ATTEMPTS = f"""
import json, os, socket, ssl, urllib.request
out = {{"proxy_variables": [name for name in os.environ if "proxy" in name.lower()]}}
def attempt(name, action):
    try:
        out[name] = action()
    except Exception as error:
        out[name] = type(error).__name__
def fetch(url, host=None, headers={{}}):
    request = urllib.request.Request(url, headers=dict(headers, **({{"Host": host}} if host else {{}})))
    return urllib.request.urlopen(request, timeout=20).read().decode()
def raw(port, data=b""):
    with socket.create_connection(("{ADDRESS}", port), timeout=20) as s:
        s.sendall(data)
        return s.recv(100).decode("latin-1")
def tls(address, name):
    context = ssl.create_default_context(cafile="cert.pem")
    with socket.create_connection((address, 443), timeout=20) as s:
        with context.wrap_socket(s, server_hostname=name) as t:
            t.sendall(b"GET / HTTP/1.1\\r\\nHost: {ALLOWED}\\r\\nConnection: close\\r\\n\\r\\n")
            return t.recv(12).decode()
secret = {{"Authorization": "Bearer x", "Cookie": "a=b", "X-Api-Key": "k", "X-Plain": "stays"}}
attempt("allowed_http", lambda: fetch("http://{ALLOWED}/hello", headers=secret))
attempt("allowed_tls", lambda: tls("{ALLOWED}", "{ALLOWED}"))
attempt("other_name", lambda: socket.getaddrinfo("{OTHER}", 80))
attempt("other_host_header", lambda: fetch("http://{ADDRESS}/", host="{OTHER}"))
attempt("other_server_name", lambda: tls("{ADDRESS}", "{OTHER}"))
attempt("no_server_name", lambda: raw(443, b"\\x16\\x03\\x01\\x00\\x05\\x01\\x00\\x00\\x01\\x00"))
attempt("address_only", lambda: raw(80, b"GET / HTTP/1.1\\r\\nHost: {ADDRESS}\\r\\n\\r\\n"))
attempt("other_port", lambda: raw(8080))
two = b"GET /one HTTP/1.1\\r\\nHost: {ALLOWED}\\r\\n\\r\\nGET /two HTTP/1.1\\r\\nHost: {OTHER}\\r\\n\\r\\n"
attempt("second_request", lambda: raw(80, two)[:15])
attempt("link_local", lambda: fetch("http://169.254.169.254/"))
print(json.dumps(out))
"""

NOTHING = f"""
import socket
for family, address in ((socket.AF_INET, ("{ADDRESS}", 80)),):
    try:
        socket.create_connection(address, timeout=3)
        print("reached")
    except OSError:
        print("unreachable")
"""


async def scenario(spec: str, directory: Path) -> dict[str, Any]:
    """Run the attempts in a box with an allow-list, and beside it in one without a way out."""
    certificate = serve(directory)
    base = make_base(directory)
    provider = load_provider(spec)(SandboxConfig(workers=2, memory_mb=384, processes=32, disk_mb=64))
    found: dict[str, Any] = {"modes": list(provider.capabilities.egress)}
    try:
        box = await provider.start(str(base), egress=Egress(mode="allowlist", hosts=(ALLOWED,)))
        box.write("cert.pem", certificate.read_bytes())
        options = ["--no-input", "--disable-pip-version-check", "--no-cache-dir", "--retries", "0", "--cert", "cert.pem"]
        where = ["--index-url", f"https://{ALLOWED}/simple/", "--target", "site", "demo-package"]
        installed = await box.exec(["python3", "-m", "pip", "install", *options, *where], timeout_s=900)
        found["pip"] = [installed.exit_code, installed.output[-500:]]
        imported = await box.exec(
            ["python3", "-c", "import sys; sys.path.insert(0, 'site'); import demo_package as d; print(d.ANSWER)"], timeout_s=300
        )
        found["imported"] = imported.output
        attempts = await box.exec(["python3", "-c", ATTEMPTS], timeout_s=900)
        found["attempts"] = json.loads(attempts.output) if attempts.exit_code == 0 else attempts.output
        fork = await box.fork()
        again = await fork.exec(
            ["python3", "-c", f"import urllib.request as r; print(r.urlopen('http://{ALLOWED}/f').read())"], timeout_s=300
        )
        found["fork"] = again.output
        closed = await provider.start(str(base))
        found["none"] = (await closed.exec(["python3", "-c", NOTHING], timeout_s=300)).output
        found["events"] = [[event.name, event.port, event.refused] for event in provider.egress_events()]
        found["seen"] = REQUESTS
    finally:
        await provider.close()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="strop-egress-") as name:
        os.chmod(name, 0o755)
        print(json.dumps(asyncio.run(scenario(sys.argv[1], Path(name)))))
