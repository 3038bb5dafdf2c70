"""Rows of the SWE-bench family and of R2E-Gym: read strictly, written again unchanged, and what they mean to a runner."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from strop.core.errors import TaskError, nearest
from strop.tasks.importers.diffs import files_of, patch_of_commit, reverse
from strop.tasks.importers.hostile import File, parse_json
from strop.tasks.importers.record import Blueprint, Gold, ImportedTask, Network, Place, StepPlan, VerifierPlan, make_task
from strop.tasks.importers.row_tables import ROW_TABLES, detect, test_names

NO_STATEMENT = "Some tests of this repository fail. Find out why and repair it."
"""What an agent is told where a row has no problem statement (SWE-smith has such rows)."""

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)


def import_row(
    row: Mapping[str, Any], where: str, *, format_name: str = "", split: str = "train", files: Mapping[str, File] | None = None
) -> ImportedTask:
    """Return the task of one row.

    Args:
        row: Its columns, from ``hostile.read_rows``.
        where: What messages call it.
        format_name: Its format; by default found from its columns.
        split: Where the task goes.
        files: Files that came with it.

    Raises:
        TaskError: A column is unknown, missing or wrong, or what it holds contradicts itself; the message names it.
    """
    name_of_format = format_name or detect(row)
    if name_of_format not in ROW_TABLES:
        raise TaskError(f"row format {name_of_format!r} is unknown.{nearest(name_of_format, ROW_TABLES)}")
    fields = ROW_TABLES[name_of_format].read(row, where)
    name = _name(name_of_format, fields)
    repository = fields.get("repo") or fields["repo_name"]
    task = make_task(
        name_of_format,
        name,
        instruction_of(name_of_format, fields),
        split=split,
        source=repository,
        cluster=repository,
        commit=fields.get("base_commit") or fields.get("commit_hash") or "",
        licence=fields.get("license_name") or fields.get("license") or "",
    )
    record = ImportedTask(format=name_of_format, name=name, fields=fields, files=dict(files or {}), task=task)
    blueprint(record)
    return record


def export_row(task: ImportedTask) -> dict[str, Any]:
    """Return the row of an imported task, as it was read."""
    return dict(task.fields)


def _name(format_name: str, fields: Mapping[str, Any]) -> str:
    if format_name != "r2e-gym":
        return fields["instance_id"]
    return f"{fields['repo_name']}__{fields['commit_hash']}".replace("/", "__")


def instruction_of(format_name: str, fields: Mapping[str, Any]) -> str:
    """Return what an agent is told: the problem statement, never hints, patches or tests.

    The part between the issue marks where R2E-Gym has them, and the interface that hidden tests rely on where SWE-rebench V2 gives one.
    """
    statement = fields.get("problem_statement") or fields.get("pr_description") or ""
    if format_name == "r2e-gym" and (match := _ISSUE.search(statement)):
        statement = match[1]
    statement = statement.strip() or NO_STATEMENT
    interface = (fields.get("interface") or "").strip() if format_name == "swe-rebench-2" else ""
    return (
        f"{statement}\n\nInterface:\n{interface}" if interface and interface.lower() != "no new interfaces are introduced." else statement
    )


def blueprint(task: ImportedTask) -> Blueprint:
    """Return what a runner needs to know about an imported row.

    Raises:
        TaskError: The patches or tests of the row contradict each other.
    """
    fields, where = task.fields, f"{task.format} row {task.name!r}"
    fail_to_pass, pass_to_pass = test_names(fields.get("FAIL_TO_PASS")), test_names(fields.get("PASS_TO_PASS"))
    if both := set(fail_to_pass) & set(pass_to_pass):
        raise TaskError(f"{where}: {sorted(both)[0]!r} stands in FAIL_TO_PASS and in PASS_TO_PASS")
    image = image_of(task.format, fields)
    workdir = workdir_of(task.format, fields)
    settings = {"install_config": fields["install_config"]} if not image and "install_config" in fields else {}
    # The verifier takes nothing from the agent's environment but the difference, and neither may reach the network: the fix is public.
    place = Place(image=image, workdir=workdir, network=Network(mode="no-network"), settings=settings)
    verifier = VerifierPlan(
        is_separate=True,
        place=place,
        timeout_s=1800.0,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        expected=parse_json(fields["expected_output_json"], where) if task.format == "r2e-gym" else {},
    )
    gold, bug = _patches(task.format, fields, where)
    return Blueprint(
        place=place,
        steps=(StepPlan(instruction=task.task.instruction, verifier=verifier),),
        gold=Gold(kind="patch", value=gold) if gold else Gold(),
        base_commit=fields.get("base_commit") or "",
        bug_patch=bug,
        test_patch=fields.get("test_patch") or "",
    )


def _patches(format_name: str, fields: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The gold patch, and the patch that makes the bug."""
    if format_name == "swe-smith":
        try:
            return reverse(fields["patch"]), fields["patch"]
        except TaskError as error:
            raise TaskError(f"{where}.patch: {error}") from None
    if format_name == "r2e-gym":
        content = fields.get("parsed_commit_content")
        return (patch_of_commit(parse_json(content, where), tests=False, where=f"{where}.parsed_commit_content") if content else "", "")
    gold = fields["patch"]
    if gold.strip() and fields["test_patch"].strip() and gold == fields["test_patch"]:
        raise TaskError(f"{where}: patch and test_patch are the same")
    if gold.strip() and not files_of(gold):
        raise TaskError(f"{where}.patch changes no file; it isn't a unified diff")
    return gold if gold.strip() else "", ""


def image_of(format_name: str, fields: Mapping[str, Any]) -> str:
    """Return the image of a row; for SWE-bench 4 and earlier the one that its harness derives from the instance's name."""
    for key in ("image", "image_name", "docker_image"):
        if fields.get(key):
            return fields[key]
    if format_name != "swe-bench":
        return ""
    return f"swebench/sweb.eval.x86_64.{fields['instance_id']}:latest".lower().replace("__", "_1776_")


def workdir_of(format_name: str, fields: Mapping[str, Any]) -> str:
    """Return where the repository lies in the image."""
    return f"/{fields['repo'].split('/')[1]}" if format_name == "swe-rebench-2" else "/testbed"


def test_command(task: ImportedTask) -> str:
    """Return the shell command that runs a row's tests, or ``""`` where its format has none of its own."""
    command = (task.fields.get("install_config") or {}).get("test_cmd") or ""
    return command if isinstance(command, str) else "\n".join(command)
