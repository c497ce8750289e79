"""`python -m experiments.bench NAME [options]`: runs one benchmark; `NAME --help` lists its options."""

import importlib
import sys
from collections.abc import Sequence

from jaxremat.errors import did_you_mean

BENCHES = {
    "digests": "final parameters of a short run under every policy: the same bits",
    "distributed": "loss curves of several processes and devices beside one device's",
    "engine": "time to trace and rewrite, and what a policy saves on a chain of convolutions",
    "harness": "step time of the harness beside a bare jitted loop",
    "kill": "a run that is killed ten times beside an undisturbed one",
    "peak": "the peak alone beside the whole compilation: the same bytes, in how much of the time",
    "plan": "the planner at the peak of every common use of jax.checkpoint: which recomputes less",
    "torch_budget": "torch.compile's memory budget at ten settings: kept, peak and recomputed, beside the planner",
    "ops": "the operations that keep less beside their counterparts: bytes, errors, time",
}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that `argv` names and returns its exit status."""
    if len(argv) > 0 and argv[0] in BENCHES:
        return importlib.import_module(f"experiments.bench.{argv[0]}").main(argv[1:])
    listing = "\n".join(f"  {name:12} {what}" for name, what in BENCHES.items())
    if len(argv) > 0 and argv[0] in ("-h", "--help"):
        print(f"usage: python -m experiments.bench NAME [options]\n{listing}")
        return 0
    got = f"got {argv[0]!r}.{did_you_mean(argv[0], BENCHES)}" if len(argv) > 0 else "got none."
    print(f"error: the first argument must name a benchmark; {got}\n{listing}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
