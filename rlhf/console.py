"""The one terminal that everything writes to, so that a live display and log lines do not tear each other."""

from rich.console import Console

console = Console(highlight=False, soft_wrap=True)
