"""``strop regrade``, ``strop sandbox check`` and ``strop numerics verify``, through the command line."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strop.cli.main import app
from strop.core.config import RunConfig, SandboxConfig, load_config
from strop.core.episode import Episode, EpisodeKey, Trace, VersionSpan
from strop.core.outcome import Failed, Flag, Outcome, Scored
from strop.grading.probes import HONEYPOT, ProbePool
from strop.grading.regrade import why
from strop.grading.repair import RepairGrader
from strop.numerics.certificate import Evidence, issue_certificate
from strop.runtime.tasks import cache_root
from strop.sandboxes import BubblewrapProvider, check_host
from strop.store import RunDir
from strop.tasks.pool import BUILTIN, open_pool

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def strop(capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """The command in this process: ``(exit code, stdout, stderr)``."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app([str(argument) for argument in arguments], prog_name="strop")
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def usable_host() -> None:
    for requirement in check_host():
        if requirement.is_required and not requirement.ok:
            pytest.skip(f"{requirement.name}: {requirement.detail}")


# ------------------------------------------------------------------------------------------------ regrade


def trace() -> Trace:
    return Trace(
        token_ids=np.arange(2, dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        versions=(VersionSpan(start=0, end=2, version=0),),
    )


@pytest.fixture(scope="module")
def episodes(usable_host: None) -> list[Episode]:
    """Graded as a run grades: a repair, nothing done, a broken file, a repaired probe; one that the machinery lost; one of another pool."""
    pool = open_pool(BUILTIN, cache_root() / "pools")
    probes = ProbePool(pool, cache_root() / "probes")
    task = pool.tasks("train")[0]
    probe = probes.probe(task, HONEYPOT)
    path, _ = pool.function(task)
    changes: list[dict[str, bytes | None]] = [{path: pool.gold_source(task).encode()}, {}, {path: b"def broken(:\n"}]

    def episode(sample: int, **more: object) -> Episode:
        key = EpisodeKey(phase="rl", step=0, task_id=task.task_id, sample=sample)
        return Episode(**{"key": key, "traces": (trace(),), "turns": (), "stop_reason": "submitted", **more})  # type: ignore[arg-type]

    async def grade() -> list[Episode]:
        provider = BubblewrapProvider(SandboxConfig(workers=1))
        grader = RepairGrader(probes, provider, seed=RunConfig().seed)
        try:
            played = [(task, episode(sample, changes=change)) for sample, change in enumerate(changes)]
            played.append((probe, episode(3, key=EpisodeKey(phase="rl", step=0, task_id=probe.task_id, sample=3), changes=changes[0])))
            return [replace(item, outcome=await grader.grade(own, item)) for own, item in played]
        finally:
            await grader.close()
            await provider.close()

    lost = episode(7, traces=(), stop_reason="failed", outcome=Failed(error="SandboxError: no room"))
    foreign = episode(8, key=EpisodeKey(phase="rl", step=0, task_id="elsewhere", sample=8), outcome=Scored(reward=1.0))
    return [*asyncio.run(grade()), lost, foreign]


def make_run(path: Path, episodes: list[Episode]) -> Path:
    with RunDir.create(path, load_config(None, ["sandbox.workers=2"])) as run:
        for episode in episodes:
            run.store.put_episode(episode)
        run.store.commit_step(0)
    return path


def test_grading_again_changes_nothing(strop: Cli, episodes: list[Episode], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", episodes)
    assert [episode.outcome.reward for episode in episodes[:4]] == [1.0, 0.0, 0.0, 1.0]  # type: ignore[union-attr]
    assert strop("regrade", run) == (
        0,
        "4 episodes graded again, 0 outcomes changed\n"
        "1 episodes skipped: the machinery lost them before there was anything to grade\n"
        "1 episodes of elsewhere skipped: the pool has no such task\n",
        "",
    )
    assert strop("regrade", run, "--phase", "eval.*")[1] == "0 episodes graded again, 0 outcomes changed\n"


def test_what_was_never_graded_is_no_change(strop: Cli, episodes: list[Episode], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [replace(episodes[0], outcome=None)])
    assert strop("regrade", run) == (
        0,
        "0 episodes graded again, 0 outcomes changed\n1 episodes skipped: they were never graded\n",
        "",
    )


def test_a_stored_verdict_that_is_not_the_graders_is_found(strop: Cli, episodes: list[Episode], tmp_path: Path) -> None:
    repaired, unchanged, broken, *_ = episodes
    forged = replace(unchanged, outcome=Scored(reward=1.0, parts={"passed": 9.0, "total": 9.0}))
    run = make_run(tmp_path / "run", [repaired, forged, broken])
    code, out, _ = strop("regrade", run)
    assert code == 1
    assert out.splitlines()[0] == "3 episodes graded again, 1 outcomes changed"
    assert out.splitlines()[1] == f"{forged.key}: 1 9/9 -> 0 unchanged (passed 9 -> none; total 9 -> none)"


def test_another_reward_is_a_registered_grader(
    strop: Cli, episodes: list[Episode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_reward.py").write_text(
        "from strop.core.outcome import Scored\n"
        "class Half:\n"
        "    def __init__(self, pool, provider, *, seed): pass\n"
        "    async def grade(self, task, episode): return Scored(reward=0.5 if episode.changes else 0.0, reason='half')\n"
        "    async def close(self): pass\n"
    )
    folder = tmp_path / "half_reward-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: half_reward\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[strop.graders]\nhalf = half_reward:Half\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = make_run(tmp_path / "run", episodes[:3])
    code, out, _ = strop("regrade", run, "--reward", "half")
    assert code == 0
    assert out.splitlines()[0] == "3 episodes graded again, 3 outcomes changed"
    assert " -> 0.5 half (" in out
    code, _, error = strop("regrade", run, "--reward", "haf")
    assert (code, error.count("\n")) == (2, 1)
    assert "unknown grader 'haf'. Did you mean 'half'" in error


def test_regrading_what_is_no_run(strop: Cli, tmp_path: Path) -> None:
    code, _, error = strop("regrade", tmp_path / "nowhere")
    assert code == 1
    assert "nowhere is not a run directory" in error


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Scored(reward=0.0, reason="tests"), Scored(reward=1.0), []),
        (Failed(error="x"), Scored(reward=1.0, parts={"passed": 1.0}), []),
        (Scored(reward=1.0, parts={"a": 1.0, "b": 2.0}), Scored(reward=1.0, parts={"a": 1.5, "b": 2.0}), ["a 1 -> 1.5"]),
        (
            Scored(reward=1.0, flags=(Flag(rule="skip", severity="hack", evidence="a.py: skip"),)),
            Scored(reward=1.0, flags=(Flag(rule="skip", severity="hack", evidence="b.py: skip"),)),
            ["no longer skip: a.py: skip", "now skip: b.py: skip"],
        ),
        (Scored(reward=1.0, layers=("a",)), Scored(reward=1.0, layers=("a", "b")), ["layers ('a',) -> ('a', 'b')"]),
    ],
)
def test_what_a_summary_hides_is_said(before: Outcome, after: Outcome, expected: list[str]) -> None:
    assert list(why(before, after)) == expected


# ------------------------------------------------------------------------------------------------ sandbox check


def test_a_sandbox_that_conforms(strop: Cli, usable_host: None) -> None:
    code, out, _ = strop("sandbox", "check", "bubblewrap", "--only", "stop_is_final", "--only", "dotdot_escape")
    assert code == 0
    assert out.splitlines() == [
        "pass    stop_is_final",
        "pass    dotdot_escape",
        "pass    base_unmodified",
        "bubblewrap: 3 passed, 0 missing here, 0 failed",
    ]


def test_a_sandbox_that_does_not(strop: Cli, usable_host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forgetful_box.py").write_text(
        "from strop.sandboxes.bubblewrap import BubblewrapProvider, BubblewrapSandbox\n"
        "class Box(BubblewrapSandbox):\n"
        "    def changes(self): return {path: data for path, data in super().changes().items() if data is not None}\n"
        "class Provider(BubblewrapProvider):\n"
        "    async def start(self, base):\n"
        "        box = await super().start(base)\n"
        "        box.__class__ = Box\n"
        "        return box\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = strop("sandbox", "check", "forgetful_box:Provider", "--only", "file_operations")
    assert code == 1
    assert out.startswith("FAIL    file_operations: AssertionError: ")
    assert out.endswith("forgetful_box:Provider: 1 passed, 0 missing here, 1 failed\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bubblewarp",), "unknown sandbox 'bubblewarp'. Did you mean 'bubblewrap'"),
        (("bubblewrap", "--only", "fork_bom"), "unknown conformance check 'fork_bom'. Did you mean 'fork_bomb'"),
        (("no_such_module:Box",), "can't be imported"),
    ],
)
def test_wrong_names_are_explained(strop: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, error = strop("sandbox", "check", *arguments)
    assert (code, out) == (2, "")
    assert message in error


# ------------------------------------------------------------------------------------------------ numerics verify


@pytest.fixture
def certified(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    state = {"version": 1, "weights": {"a": np.linspace(0, 1, 12, dtype=np.float32)}}
    with RunDir.create(path, RunConfig()) as run:
        run.store.log(0, {"numerics/tokens": 50.0, "numerics/is_exact": 1.0, "numerics/logprob_diff_max_nats": 0.0})
        run.store.save_state("rl-0", state, {}, rolling=True)
        run.store.commit_step(0, checkpoint="rl-0", weights_digest="d0")
        issue_certificate(path / "certificate.json", run.store, Evidence(state=state))
    return path


def test_a_certificate_is_verified_by_run_and_by_file(strop: Cli, certified: Path, tmp_path: Path) -> None:
    code, out, _ = strop("numerics", "verify", certified)
    assert code == 0
    assert out.splitlines()[0] == f"{certified / 'certificate.json'}: verified against {certified}"
    assert "2 tensors of the state, 1 weight digests in the chain, mode exact" in out
    assert "50 tokens of 1 steps compared between rollout and trainer, largest difference 0 nats" in out
    assert strop("numerics", "verify", certified / "certificate.json")[1] == out
    moved = Path(shutil.copy(certified / "certificate.json", tmp_path / "mine.json"))
    assert strop("numerics", "verify", moved, "--run", certified)[0] == 0
    code, _, error = strop("numerics", "verify", moved)
    assert code == 2
    assert "name the run of" in error


def test_a_changed_certificate_and_a_changed_run_are_found(strop: Cli, certified: Path) -> None:
    file = certified / "certificate.json"
    original = file.read_text()
    record = json.loads(original)
    record["body"]["exactness"]["logprob_diff_max_nats"] = 1.0
    file.write_text(json.dumps(record))
    code, _, error = strop("numerics", "verify", certified)
    assert code == 1
    assert "the file was changed" in error
    file.write_text(original)
    with (certified / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"phase": "rl", "step": 1, "numerics/tokens": 1.0, "numerics/is_exact": 0.0}) + "\n")
    code, _, error = strop("numerics", "verify", certified)
    assert code == 1
    assert "statistics differ from the metrics of the run" in error


def test_nothing_to_verify(strop: Cli, certified: Path, tmp_path: Path) -> None:
    (certified / "certificate.json").unlink()
    for path, message in ((certified, "has no certificate.json"), (tmp_path, "neither a run nor a certificate")):
        code, out, error = strop("numerics", "verify", path)
        assert (code, out) == (1, "")
        assert message in error
