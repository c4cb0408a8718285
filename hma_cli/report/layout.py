"""How a table fits a narrow terminal: headings wrap, then columns are left out. A number is never cut."""

from __future__ import annotations

from dataclasses import dataclass

from hma_cli.report.result import Table

WIDE_PADDING, NARROW_PADDING = 3, 1  # characters from column to column


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """columns: indices of those that are shown. widths: of these, None where they take what they need."""

    columns: tuple[int, ...]
    widths: tuple[int | None, ...]
    narrow: bool
    left_out: tuple[str, ...] = ()

    @property
    def total(self) -> int | None:
        """Characters of a line of a narrow table; None where there is room."""
        return sum(width or 0 for width in self.widths) + NARROW_PADDING * len(self.widths) + 1 if self.narrow else None


def is_right(table: Table, column: int) -> bool:
    """Whether a column holds numbers, or says that it does."""
    numbers = bool(table.rows) and all(isinstance(row[column], int | float) for row in table.rows)
    return numbers or table.columns[column] in table.right


def printed(value: object) -> str:
    """A cell as it is printed."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def fitted(table: Table, width: int) -> Fitted:
    """The table in `width` characters, without its optional columns as far as they do not fit.

    What cannot be left out is as narrow as its longest number or word, and wider than the terminal if need be.
    """
    everything = tuple(range(len(table.columns)))
    if not any(is_right(table, column) for column in everything):
        return Fitted(columns=everything, widths=(None,) * len(everything), narrow=False)  # words wrap by themselves
    natural = [max(_line(text) for text in _texts(table, column)) for column in everything]
    if sum(natural) + WIDE_PADDING * len(natural) + 1 <= width:
        return Fitted(columns=everything, widths=(None,) * len(everything), narrow=False)
    least = [_least(table, column) for column in everything]
    shown = list(everything)
    left_out = []
    for name in table.optional:
        if _room(width, [least[column] for column in shown]) >= 0:
            break
        shown.remove(table.columns.index(name))
        left_out.append(name)
    widths = _shared_out(
        [least[column] for column in shown],
        [natural[column] for column in shown],
        _room(width, [least[column] for column in shown]),
    )
    return Fitted(columns=tuple(shown), widths=tuple(widths), narrow=True, left_out=tuple(left_out))


def _room(width: int, widths: list[int]) -> int:
    return width - sum(widths) - NARROW_PADDING * len(widths) - 1


def _shared_out(least: list[int], natural: list[int], room: int) -> list[int]:
    """Give the columns that lack least what they lack, as long as there is room."""
    widths = list(least)
    for index in sorted(range(len(widths)), key=lambda column: natural[column] - least[column]):
        more = min(natural[index] - least[index], max(0, room))
        widths[index] += more
        room -= more
    return widths


def _texts(table: Table, column: int) -> list[str]:
    return [table.columns[column], *(printed(row[column]) for row in table.rows)]


def _least(table: Table, column: int) -> int:
    """A heading wraps at its words, a number never; words do."""
    heading, *cells = _texts(table, column)
    words = _word(heading)
    return max(words, *(_line(text) if is_right(table, column) else _word(text) for text in cells), 1)


def _line(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def _word(text: str) -> int:
    return max(map(len, text.split()), default=0)
