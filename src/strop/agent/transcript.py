"""Reads a finished episode in the terminal: ``strop episodes`` prints what these functions return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from strop.agent.toolspec import order_arguments
from strop.core.episode import Episode, Turn
from strop.core.outcome import Failed, Outcome, Scored, Ungraded

_CONTROLS = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
_STATUS_STYLE = {"ok": "green", "tool_error": "yellow", "malformed": "red"}
_MAX_TEXT_CHARS = 4000


class Decoder(Protocol):
    """What the reader needs of a renderer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """All tokens as text, special ones spelled out."""
        ...


def render_transcript(episode: Episode, renderer: Decoder) -> str:
    """Return an episode as plain text: prompt, numbered turns with call, status, tokens and answer, changed files, outcome.

    Args:
        episode: With or without an outcome.
        renderer: Decodes the prompt.
    """
    blocks = [headline(episode), "--- prompt", _prompt(episode, renderer)]
    for number, turn in enumerate(episode.turns, 1):
        blocks += [f"--- {_turn_line(number, turn)}", _action(turn)]
        if turn.observation:
            blocks.append(_indent(turn.observation))
    blocks += ["--- end", *_end_lines(episode)]
    return _shown("\n".join(blocks) + "\n")


def rich_transcript(episode: Episode, renderer: Decoder) -> RenderableType:
    """Return the same for a terminal with colours; texts of the agent and of tools are never read as markup."""
    parts: list[RenderableType] = [
        Text(headline(episode), style="bold"),
        Rule("prompt", align="left"),
        Text(_shown(_prompt(episode, renderer))),
    ]
    for number, turn in enumerate(episode.turns, 1):
        parts.append(Rule(Text(_shown(_turn_line(number, turn))), align="left", style=_STATUS_STYLE.get(turn.status, "none")))
        parts.append(Text(_shown(_action(turn)), style="bold cyan"))
        if turn.observation:
            parts.append(Text(_shown(_indent(turn.observation)), style="dim" if turn.status == "ok" else "yellow"))
    parts += [Rule("end", align="left"), *(Text(_shown(line)) for line in _end_lines(episode))]
    return Group(*parts)


def _shown(text: str) -> str:
    """Return ``text`` with control characters (escape sequences of terminals begin with one) as visible signs."""
    return text if text.isprintable() else text.translate(_CONTROLS)


def headline(episode: Episode) -> str:
    """Return one line: key, turns, tokens, why it ended, outcome."""
    tokens = sum(len(trace) for trace in episode.traces)
    sampled = sum(int(trace.loss_mask.sum()) for trace in episode.traces)
    ended = f"{episode.stop_reason}{' (truncated)' if episode.is_truncated else ''}"
    return _shown(
        f"{episode.key}  {len(episode.turns)} turns  {tokens} tokens ({sampled} sampled)  {ended}  {describe_outcome(episode.outcome)}"
    )


def describe_outcome(outcome: Outcome | None) -> str:
    """Return an outcome in a few words."""
    if outcome is None:
        return "not graded"
    if isinstance(outcome, Scored):
        reason = f" ({outcome.reason})" if outcome.reason else ""
        flags = "".join(f" [{flag.severity}: {flag.rule}]" for flag in outcome.flags)
        return f"reward {outcome.reward:g}{reason}{flags}"
    if isinstance(outcome, Ungraded):
        return f"ungraded: {outcome.reason}"
    assert isinstance(outcome, Failed)
    return f"failed: {outcome.error}"


def _prompt(episode: Episode, renderer: Decoder) -> str:
    if not episode.traces:
        return "(no tokens)"
    trace = episode.traces[0]
    end = next((turn.start for turn in episode.turns if turn.trace == 0), len(trace))
    return _cut(renderer.decode(trace.token_ids[:end].tolist()))


def _turn_line(number: int, turn: Turn) -> str:
    return f"turn {number}  {turn.status}  {turn.end - turn.start} tokens  generate {turn.generate_s:.3f} s  tool {turn.tool_s:.4f} s"


def _action(turn: Turn) -> str:
    if not turn.call:
        return f"malformed: {_cut(turn.text)!r}"
    return " ".join([turn.call, *(_argument(value) for value in order_arguments(turn.call, turn.arguments))])


def _argument(value: str) -> str:
    """An argument as a word, quoted unless it is plain."""
    is_plain = value != "" and value.isprintable() and not any(c in value for c in " '\"\\")
    return value if is_plain else repr(value)


def _end_lines(episode: Episode) -> list[str]:
    lines = [f"outcome: {describe_outcome(episode.outcome)}", f"stopped: {episode.stop_reason}"]
    if isinstance(episode.outcome, Scored):
        lines += [f"  {name}: {value:g}" for name, value in episode.outcome.parts.items()]
        lines += [f"  {flag.severity} {flag.rule}: {flag.evidence}" for flag in episode.outcome.flags]
    if episode.turns and episode.is_truncated and episode.turns[-1].observation:
        lines.append("the last answer was not shown to the agent")
    for path, content in sorted(episode.changes.items()):
        lines.append(f"changed: {path} ({'deleted' if content is None else f'{len(content)} bytes'})")
    lines += _table("stats", episode.stats) + _table("costs", episode.costs)
    return lines


def _table(title: str, values: Mapping[str, float]) -> list[str]:
    return [f"{title}: " + ", ".join(f"{name} {value:.6g}" for name, value in values.items())] if values else []


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in _cut(text).split("\n"))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]}\n[{len(text) - _MAX_TEXT_CHARS} characters left out]"
