"""How benchmarks answer: a table for people, then one line of JSON, the last of standard output."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table


def show(table: Table, result: dict[str, Any]) -> None:
    """Prints both."""
    Console().print(table)
    print(json.dumps(result, allow_nan=False), flush=True)
