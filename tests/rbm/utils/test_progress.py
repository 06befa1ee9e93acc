"""The progress of a run: bars in a terminal, lines in a log file, nothing if it is switched off."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from rbm.utils import progress
from rbm.utils.progress import Progress, count_runs


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by the test: the time is ``clock.now``."""
    moved = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: moved.now))
    return moved


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=60)


def test_a_file_gets_a_line_in_ten_seconds_and_one_at_the_end(clock, console):
    with Progress(console).phase("rbm", 2000) as bar:
        for epoch in range(5):
            clock.now += 4
            bar.update(epoch + 1, f"loss {1 / (epoch + 1):.2f}")
        assert console.file.getvalue() == "rbm  3/2000  loss 0.33  12.0 s\n", "while it runs, not when it ends"
        bar.finish("best epoch 4: val 90.00%  test 80.00%, which is longer than a line of this console")
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2, "no line is folded or cut"
    assert lines[1].startswith("rbm  5/5  best epoch 4: val 90.00%  test 80.00%, ")
    assert lines[1].endswith("  20.0 s")


def test_steps_and_counts_in_a_file(clock, console):
    shown = Progress(console)
    with shown.step("encodings"), shown.count("rows", None) as advance:
        advance(7)
        advance(8)
    shown.say("[done] 3 of 4")
    assert console.file.getvalue() == "encodings\nrows  15/15  0.0 s\n[done] 3 of 4\n"


def test_runs_in_a_file(clock, console):
    with count_runs(console, "runs", 3) as bar:
        bar.update(0, "")
        clock.now += 1.5
        bar.update(1, "digits seed 0")
        bar.update(1, "digits seed 0")
        bar.update(2, "digits seed 1")
    assert console.file.getvalue() == "runs  1/3  digits seed 0  1.5 s\nruns  2/3  digits seed 1  1.5 s\n"


@pytest.mark.parametrize("name", ["top_k [k=3]", "a[/b]", "[red]c"])
def test_brackets_in_a_terminal_are_no_markup(name):
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with count_runs(terminal, f"1 {name}", 2) as bar:
        bar.update(1, f"2 {name}")
    with Progress(terminal).phase(f"3 {name}", 2) as bar:
        bar.update(1, f"4 {name}")
    with Progress(terminal).count(f"5 {name}", 2):
        pass
    with Progress(terminal).step(f"6 {name}"):
        pass
    assert all(f"{place} {name}" in terminal.file.getvalue() for place in range(1, 7))


def test_a_finished_bar_tells_how_long_it_took():
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Progress(terminal).phase("mlp", 50) as bar:
        bar.update(3, "loss 0.5")
        bar.finish("best epoch 2: val 90.00%")
    end = terminal.file.getvalue().split("\n")[-2]
    assert "3/3" in end
    assert "best epoch 2: val 90.00%" in end
    assert "0.0 s" in end
    assert "0:00:00" not in end


def test_no_time_is_left_of_finished_runs():
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    with count_runs(terminal, "runs", 2) as bar:
        bar.update(1, "digits seed 0")
        assert "left " in terminal.file.getvalue()
        bar.update(2, "digits seed 1")
    end = terminal.file.getvalue().split("\x1b[2K")[-1]  # what remains after the line was last written
    assert "2/2" in end
    assert "left" not in end


def test_without_a_console_nothing_is_said(capsys):
    silent = Progress(None)
    with silent.phase("rbm", 3) as bar, silent.step("x"), silent.count("rows", 3) as advance:
        bar.update(1, "x")
        advance(3)
        bar.finish()
    with count_runs(None, "runs", 2) as bar:
        bar.update(1, "x")
    assert capsys.readouterr() == ("", "")


def test_every_function_takes_auto_for_a_console(capsys):
    """Regression test: only rbm.distill took it; elsewhere it ended in an AttributeError."""
    Progress("auto").say("one")
    with count_runs("auto", "runs", 2) as bar:
        bar.update(1)
    assert capsys.readouterr() == ("", "")
    for refused in ("Auto", 3):
        with pytest.raises(TypeError, match=r"^console is .*, expected a rich\.console\.Console"):
            Progress(refused)
        with pytest.raises(TypeError, match=r"^console is "), count_runs(refused, "runs", 2):
            pass
