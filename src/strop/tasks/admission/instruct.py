"""What the agent is told: what is wrong and which tests show it, never how it is repaired."""

from __future__ import annotations

from collections.abc import Sequence

from strop.tasks.makers.draft import Draft

MAX_SHOWN = 8


def instruction(draft: Draft, *, package: str, visible: Sequence[str], hidden: Sequence[str]) -> str:
    """Return the instruction of a draft.

    Args:
        draft: The draft.
        package: Name of the distribution.
        visible: Failing tests that the workspace holds.
        hidden: Failing tests that it doesn't hold; only for a step of history are they named, because its message may say little.
    """
    if draft.kind == "history":
        asked = (
            f"Make this change to {package}:\n\n{draft.subject}\n\nEverything that works now must go on working. Don't change the tests."
        )
        return asked + "\n\nTests that will decide, which you can't see:\n" + _listed(hidden)
    if draft.kind == "deletion":
        what = draft.families[0]
        asked = f"The {what} `{draft.subject}` is missing from {package}. Bring it back."
        if what == "option":
            asked = f"{package} lost an option: `{draft.subject}`. Callers pass it again. Bring it back, with its default."
        elif draft.details:
            asked += f"\n\n{draft.details}"
        return asked + _failing(visible, len(hidden))
    bugs, wanted = ("a bug", "Find it and repair it") if draft.kind == "mutation" else ("two bugs", "Find them and repair them")
    return f"There is {bugs} in {package}, and tests fail. {wanted}; don't change the tests." + _failing(visible, len(hidden))


def _failing(visible: Sequence[str], num_hidden: int) -> str:
    lines = [_listed(visible)] if visible else []
    if num_hidden:
        lines.append(f"  and {num_hidden} that you can't see")
    return "\n\nThese tests fail:\n" + "\n".join(lines) if lines else ""


def _listed(tests: Sequence[str]) -> str:
    more = [f"  and {len(tests) - MAX_SHOWN} more"] if len(tests) > MAX_SHOWN else []
    return "\n".join([*(f"  {test}" for test in tests[:MAX_SHOWN]), *more])
