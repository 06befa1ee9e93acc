"""Lines on a console, with nothing in them taken for markup."""

from rich.console import Console


def print_line(console: Console, text: str) -> None:
    """Print ``text`` as it is: brackets are no markup, numbers have no colours, and a long line is not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
