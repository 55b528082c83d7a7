"""The view of a run: a live table on a terminal, a line a step elsewhere."""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import rich.console
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dapo_megatron.monitoring.diagnosis import warnings_of
from dapo_megatron.monitoring.metrics import Record, number

ROWS = 12  # steps that stay in view
QUIET_SECONDS = 30.0  # a plain console repeats progress no more often


def _number(key: str, form: str, otherwise: str = "") -> Callable[[Record], str]:
    """The number under `key`, or under `otherwise` where a record has none (DPO has neither answers nor rewards)."""

    def text(record: Record) -> str:
        value = record.get(key, record.get(otherwise))
        return "-" if value is None else format(value, form)

    return text


def _pair(first: str, second: str, form: str) -> Callable[[Record], str]:
    def text(record: Record) -> str:
        return f"{_number(first, form)(record)}/{_number(second, form)(record)}"

    return text


# What a step shows, in this order: heading and text.
COLUMNS: dict[str, Callable[[Record], str]] = {
    "step": _pair("step", "steps", "d"),
    "kept/drawn": _pair("kept", "drawn", ".0f"),
    "accuracy": _number("accuracy", ".3f", "preference_accuracy"),
    "reward": _number("reward", "+.2f", "preference_margin"),
    "length": _number("response_length", ".1f"),
    "entropy": _number("entropy", ".3f"),
    "clip low/high": _pair("clip_low", "clip_high", ".4f"),
    "grad norm": _number("grad_norm", ".2f"),
    "lr": _number("lr", ".1e"),
    "s": _number("seconds/step", ".1f"),
    "tok/s": _number("tokens_per_second", ".0f"),
    "GB": _number("memory/peak_gb", ".1f"),
}


class PlainConsole:
    """One compact line per step, and a line of progress when nothing else was said for a while."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str | None) -> None:
        """A phase begins, or with None ends: nothing to show."""

    def progress(self, kind: str, done: float, total: float, text: str) -> None:
        """Say how far a long phase is, at most every QUIET_SECONDS."""
        if time.monotonic() - self._last >= QUIET_SECONDS:
            self._say(f"{kind} {done:.0f}/{total:.0f} {text}".rstrip())

    def step(self, record: Record) -> None:
        """Print a finished step."""
        parts = [f"{heading} {text(record)}" for heading, text in COLUMNS.items()]
        self._say(" | ".join([*parts, details(record)]))
        for warning in warnings_of(record):
            self.note(f"warning: {warning}")

    def note(self, text: str) -> None:
        """Print a line."""
        self._say(text)

    def evaluation(self, record: Record) -> None:
        """Print an evaluation."""
        self._say(evaluation_text(record))

    def close(self) -> None:
        """Nothing is left to do."""


class LiveConsole:
    """A table of the last steps with the seconds of each phase, and progress bars of what is going on."""

    def __init__(self, console: rich.console.Console) -> None:
        self._rows: deque[Record] = deque(maxlen=ROWS)
        self._evaluations: list[str] = []
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:>14}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def _render(self) -> Group:
        table = Table(*COLUMNS, title="DAPO", title_justify="left")
        rows = list(self._rows)
        for record in rows:
            table.add_row(*(text(record) for text in COLUMNS.values()))
        lines = [Text(text) for text in self._evaluations]
        if rows:
            lines.append(Text(f"last step: {details(rows[-1])}"))
        return Group(table, *lines, self._progress)

    def phase(self, name: str | None) -> None:
        """Show what goes on now; the bars of the phase before disappear."""
        for bar in self._bars.values():
            self._progress.remove_task(bar)
        self._bars.clear()
        if name is not None:
            self._bar(name)

    def progress(self, kind: str, done: float, total: float, text: str) -> None:
        """Move the bar named `kind`."""
        self._progress.update(self._bar(kind), completed=done, total=total, text=f"{done:.0f}/{total:.0f} {text}")

    def _bar(self, name: str) -> TaskID:
        """The bar `name`; it pulses until the first progress is known."""
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=None, text="")
        return self._bars[name]

    def step(self, record: Record) -> None:
        """Add a row."""
        self._rows.append(record)
        for warning in warnings_of(record):
            self.note(f"warning: {warning}")

    def note(self, text: str) -> None:
        """Print a line above the view, where it stays."""
        self._live.console.print(text, markup=False, highlight=False)

    def evaluation(self, record: Record) -> None:
        """Add a line below the table."""
        self._evaluations = [*self._evaluations[-2:], evaluation_text(record)]

    def close(self) -> None:
        """Leave the last view on the screen and give the terminal back."""
        self.phase(None)
        self._live.stop()


def open_console(
    mode: Literal["auto", "live", "plain"], console: rich.console.Console | None = None
) -> PlainConsole | LiveConsole:
    """The console that `tracking.console` asks for; `auto` is live on a terminal."""
    console = console or rich.console.Console()
    live = console.is_terminal if mode == "auto" else mode == "live"
    return LiveConsole(console) if live else PlainConsole(console)


def details(record: Record) -> str:
    """The seconds of each phase of a step, and the age of its tokens where some are of older weights, mean and largest:
    "rollout 3.1 s, update 4.0 s, staleness 0.6/1".
    """
    phases = {key.removeprefix("seconds/"): value for key, value in record.items() if key.startswith("seconds/")}
    texts = [f"{name} {seconds:.1f} s" for name, seconds in phases.items() if name != "step"]
    if number(record, "staleness_max"):
        texts.append(f"staleness {record['staleness']:.1f}/{record['staleness_max']:.0f}")
    return ", ".join(texts)


def evaluation_text(record: Record) -> str:
    """One line about an evaluation, with its interval."""
    low, high = record["interval"]
    return (
        f"evaluation {record['evaluation']} (step {record['step']}): accuracy {record['accuracy']:.3f} "
        f"[{low:.3f}, {high:.3f}] on {record['problems']} problems"
    )
