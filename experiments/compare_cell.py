"""The process of one cell of the comparison: it prepares, is timed when it is told to, and trains at the end.

`python -m experiments.compare_cell SPEC` is started by `experiments.compare` and speaks JSON lines: on standard output
`{"ready": true}`, then `{"seconds": [...]}` for each line `time N` on standard input, and the result for `finish`. A policy
that the framework refuses is a result too. Anything else that goes wrong ends the process with a traceback on standard error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from experiments import data, records
from experiments.compare_records import Cell, Result, hardware
from jaxremat import PolicyError


def prepare(cell: Cell, dataset: data.Dataset) -> Any:
    """Returns the cell's `JaxCell` or `TorchCell`, importing only its own framework.

    Raises:
        PolicyError: the framework cannot apply the policy to the model.
    """
    if cell.framework == "jax":
        from experiments.compare_jax import JaxCell

        return JaxCell(cell, dataset)
    from experiments.compare_torch import TorchCell

    return TorchCell(cell, dataset)


def main(argv: list[str]) -> int:
    """Serves one cell until it is finished."""
    spec = json.loads(argv[0])
    cell = Cell(**spec["cell"])
    directory = spec["data_dir"]
    dataset = data.load(cell.dataset, None if directory is None else Path(directory))
    try:
        prepared = prepare(cell, dataset)
    except PolicyError as error:
        refused = Result(cell, "refused", why=str(error).splitlines()[0], date=records.now(), hardware=hardware())
        print(json.dumps({"result": refused.to_json()}), flush=True)
        return 0
    print(json.dumps({"ready": True}), flush=True)
    seconds = list[float]()
    for line in sys.stdin:
        match line.split():
            case ["warm", count]:
                prepared.time_steps(int(count))
                print(json.dumps({"seconds": []}), flush=True)
            case ["time", count]:
                latest = prepared.time_steps(int(count))
                seconds += latest
                print(json.dumps({"seconds": latest}), flush=True)
            case ["finish"]:
                print(json.dumps({"result": prepared.finish(seconds).to_json()}), flush=True)
                return 0
            case _:
                raise ValueError(f"a command is 'warm N', 'time N' or 'finish'; got {line!r}")
    return 1  # the parent is gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
