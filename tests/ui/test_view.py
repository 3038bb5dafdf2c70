"""What people read in the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from strop.ui.live import LiveView, sparkline
from strop.ui.view import PlainView, View, conservation_line, format_number, format_seconds, format_value, make_view, plain_table

STEP = {
    "rl/reward": 0.25,
    "rl/success_frac": 0.314,
    "numerics/logprob_diff_max_nats": 0.0,
    "conservation/dispatched": 128,
    "conservation/trained": 120,
    "conservation/dropped": 8,
    "conservation/failed": 0,
    "conservation/in_flight": 0,
}


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("rl/success_frac", 0.314, "31.4 %"),
        ("cost/cpu_s", 75.0, "75 CPU s"),
        ("cost/moved_bytes", 5 << 20, "5.0 MiB"),
        ("rl/reward", 0.0312, "0.0312"),
        ("numerics/logprob_diff_max_nats", 0.0, "0 nats"),
        ("my_frac", 0.5, "50.0 %"),
        ("anything", "as it is", "as it is"),
    ],
)
def test_values_carry_their_unit(key, value, text):
    assert format_value(key, value) == text


def test_numbers_and_times():
    assert [format_number(v) for v in (0, 12345, 12345.6, 1.2e-7, float("nan"))] == ["0", "12,345", "12,346", "1.2e-07", "nan"]
    assert [format_seconds(v) for v in (7.25, 245, 7440)] == ["7.2 s", "4:05 min", "2:04 h"]


def test_conservation_that_does_not_hold_is_seen():
    assert conservation_line(STEP) == "128 dispatched = 120 trained + 8 dropped + 0 failed + 0 in flight"
    assert "128 dispatched != 119 trained" in conservation_line(STEP | {"conservation/trained": 119})
    assert conservation_line({"rl/reward": 1}) == ""


def test_tables_line_up():
    rows = [{"policy": "base", "success_frac": 0.012}, {"policy": "random edits", "success_frac": None}]
    assert plain_table(rows) == ["policy        success_frac", "------------  ------------", "base                 1.2 %", "random edits"]


def drive(view: View) -> None:
    view.stage("RL", 2)
    view.progress(1, reward=0.25)
    view.metrics(1, STEP)
    view.progress(2)
    view.metrics(2, STEP | {"rl/success_frac": 0.5})
    view.table([{"policy": "base", "success_frac": 0.1}], title="result")
    view.message("saved to [run]")
    view.close()
    view.close()


def test_plain_lines():
    stream = io.StringIO()
    drive(PlainView(stream))
    text = stream.getvalue()
    for part in ("== RL (2)", "RL: 2/2", "success 31.4 %", "max |dlogp| 0 nats", "128 dispatched =", "result", "10.0 %", "saved to [run]"):
        assert part in text
    assert "RL: 1/2" not in text  # progress is rare in a log


def test_the_live_panel():
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    view = LiveView(console)
    view.stage("RL", 2)
    view.progress(1)
    view.metrics(1, STEP)
    view.metrics(2, STEP | {"rl/success_frac": 0.5, "conservation/failed": 3})
    with console.capture() as capture:
        console.print(view.render())
    panel = capture.get()
    for part in ("RL - step 2", "1/2", "50.0 %", "dispatched !=", "31.4 % to 50.0 %"):
        assert part in panel
    drive(view)


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, float("nan")]) == "▁▁"
    assert sparkline([]) == ""


def test_no_terminal_gives_plain_lines():
    assert isinstance(make_view(plain=True), PlainView)
