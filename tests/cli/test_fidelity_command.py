"""``strop fidelity``: kinds, exit codes, and the report that a recipe requires."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.cli.fidelity import kind_of, parse_kind, require_fidelity
from strop.cli.main import app
from strop.cli.run import check_run
from strop.core.config import load_config
from strop.core.errors import CheckpointError, ConfigError, SandboxError
from strop.sandboxes import check_host


def test_kinds_are_read_and_written_alike():
    kind = parse_kind("bubblewrap:uptime,disk_mb=128,hostname=ci-7,memory_mb=512")
    assert str(kind) == "bubblewrap:disk_mb=128,hostname=ci-7,uptime"
    assert parse_kind(str(kind)).domain == ("hostname=ci-7", "uptime")
    config = load_config(None, ["sandbox.disk_mb=128", 'sandbox.domain=["uptime", "hostname=ci-7"]'])
    assert str(kind_of(config.sandbox)) == str(kind)
    assert str(kind_of(load_config(None).sandbox)) == "bubblewrap"


@pytest.mark.parametrize(
    "text",
    [
        "bublewrap",
        "bubblewrap:",
        "bubblewrap:nothing",
        "bubblewrap:disk_mb=0",
        "bubblewrap:disk_mb",
        "bubblewrap:disk_mb=1,disk_mb=2",
        "bubblewrap:hostname,hostname",
    ],
)
def test_a_kind_that_cannot_be_is_wrong_usage(text: str):
    with pytest.raises(ConfigError):
        parse_kind(text)


def test_wrong_usage_exits_with_2():
    assert CliRunner().invoke(app, ["fidelity", "nothing", "bubblewrap"]).exit_code == 2
    assert CliRunner().invoke(app, ["fidelity", "bubblewrap", "bubblewrap", "--boxes", "4", "--tasks", "3"]).exit_code == 2


def test_a_recipe_is_checked_before_it_runs(tmp_path: Path):
    with pytest.raises(ConfigError, match="domain setting"):
        check_run(load_config(None, ['sandbox.domain=["nothing"]']))
    with pytest.raises(CheckpointError, match="does not exist"):
        require_fidelity(load_config(None, [f'fidelity.report="{tmp_path}/none.json"']))
    require_fidelity(load_config(None))


def test_an_audit_of_a_planted_difference_exits_with_1(tmp_path: Path):
    try:
        bad = [row for row in check_host() if row.is_required and not row.ok]
    except SandboxError as error:
        pytest.skip(str(error))
    if bad:
        pytest.skip(bad[0].detail)
    out, page = tmp_path / "report.json", tmp_path / "report.html"
    command = ["fidelity", "bubblewrap:env.CI=true", "bubblewrap", "--boxes", "6", "--tasks", "2", "--permutations", "99"]
    done = CliRunner().invoke(app, [*command, "--out", str(out), "--page", str(page)])
    assert done.exit_code == 1, done.output
    assert "gate: FAIL" in done.output
    assert "only 6 boxes a side" in done.output
    record = json.loads(out.read_text())
    assert record["findings"][0]["probe"] == "variables"
    assert record["train"] == "bubblewrap:env.CI=true"
    assert "variables" in page.read_text()
