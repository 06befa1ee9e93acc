"""Lines on a console, with nothing in them taken for markup, and tables that are never cut."""

from rich.console import Console
from rich.table import Table

WIDTH = 80  # columns if standard output is not a terminal, and the smallest width that tables are made for


def print_line(console: Console, text: str) -> None:
    """Print ``text`` as it is: brackets are no markup, numbers have no colours, and a long line is not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table in at least :data:`WIDTH` columns: a narrower terminal wraps its lines, but no figure is cut."""
    Console(file=console.file, width=max(console.width, WIDTH)).print(table)
