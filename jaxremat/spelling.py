"""`parse`: from the spelling of a policy to its value. The grammar is at the head of `jaxremat.policy`."""

import re

from jaxremat.errors import PolicyError, did_you_mean
from jaxremat.policy import (
    UNITS,
    Budget,
    Dots,
    DotsNoBatch,
    Everything,
    Loops,
    Names,
    Nothing,
    Offload,
    Ops,
    Part,
    Paths,
    Policy,
    Segments,
    Values,
    union,
)

GRAMMAR = """A policy is one of
  everything | nothing | dots | dots_no_batch
  names:NAME[,NAME...]          values tagged with jaxremat.name; globs allowed
  ops:OP=ACTION[,OP=ACTION...]  ACTION is store, recompute or offload; OP may be *
  paths:PATH[,PATH...]          values made inside module paths; globs allowed
  segments:N | segments:sqrt    values at the borders of N segments
  values:I[,I...]               forward values by position; I^ in host memory
  loops:POLICY|POLICY|N*POLICY  for the function, and for the body of each scan; cut into runs of N steps;
                                a body of parts is STEPS:POLICY>POLICY
  offload:POLICY                what POLICY would store, in host memory
  budget:SIZE                   SIZE is bytes, 2GiB, 60% or fits
  POLICY+POLICY                 the union"""

_JAX_SPELLINGS = {
    "everything_saveable": "everything",
    "nothing_saveable": "nothing",
    "dots_saveable": "dots",
    "checkpoint_dots": "dots",
    "dots_with_no_batch_dims_saveable": "dots_no_batch",
    "checkpoint_dots_with_no_batch_dims": "dots_no_batch",
}
_AMBIGUOUS = ("none", "full")


def parse_size(text: str) -> int:
    """Returns the bytes that `text` spells: a number with an optional unit, KB to TB (decimal) or KiB to TiB (binary).

    Raises:
        PolicyError: `text` is not a size.

    Example:
        >>> from jaxremat.spelling import parse_size
        >>> parse_size("1.5GiB")
        1610612736
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): size for unit, size in UNITS.items()}
    unit = (match.group(2) or "B").lower() if match else ""
    if not match or unit not in units or not float(match.group(1)):
        raise PolicyError(f"A size is a positive number with a unit such as 2GiB, 500MB or 1048576; got {text!r}.")
    return round(float(match.group(1)) * units[unit])


def parse(text: str | Policy) -> Policy:
    """Returns the policy that `text` spells; a policy is returned as it is.

    Args:
        text: a spelling, see the head of `jaxremat.policy`. JAX's own long names (`dots_saveable`, ...) are accepted.

    Raises:
        PolicyError: the text is no policy. The message holds the grammar and near matches.
        TypeError: the argument is neither text nor a policy, for example a policy of `jax.checkpoint_policies`.

    Example:
        >>> import jaxremat
        >>> jaxremat.parse("dots_saveable")
        jaxremat.parse('dots')
        >>> jaxremat.parse("segments:sqt")
        Traceback (most recent call last):
        jaxremat.errors.PolicyError: segments: needs a number or sqrt; got 'sqt'. Did you mean 'sqrt'?
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str):
        raise TypeError(
            f"A policy is a spelling such as 'dots' or a jaxremat policy; got {type(text).__name__} ({text!r}). Policies "
            "of jax.checkpoint_policies and of other libraries are opaque functions: spell the same choice, for example "
            "'dots', 'names:h' or 'nothing'."
        )
    parts = [part.strip() for part in text.split("+")]
    if not any(parts):
        raise PolicyError(f"{text!r}: empty policy.\n{GRAMMAR}")
    if not all(parts):
        raise PolicyError(
            f"{text!r}: a + stands between two policies, and here one of them is missing; write "
            f"{'+'.join(filter(None, parts))!r}, or add the other."
        )
    return union(*map(_parse_part, parts))


def _parse_part(text: str) -> Policy:
    kind, colon, rest = text.partition(":")
    kind = _JAX_SPELLINGS.get(kind, kind)
    plain: dict[str, Policy] = {
        "everything": Everything(), "nothing": Nothing(), "dots": Dots(), "dots_no_batch": DotsNoBatch(),
    }  # fmt: skip
    takes_argument = {
        "names": lambda: Names(tuple(_split(rest))),
        "ops": lambda: Ops(tuple(_parse_rule(rule) for rule in _split(rest))),
        "paths": lambda: Paths(tuple(_split(rest))),
        "segments": lambda: Segments(_parse_count(rest)),
        "values": lambda: _parse_values(rest),
        "loops": lambda: _parse_loops(rest),
        "offload": lambda: Offload(_parse_part(rest)),
        "budget": lambda: Budget(_parse_amount(rest)),
    }
    if kind in plain and not colon:
        return plain[kind]
    if kind in takes_argument and rest.strip():
        return takes_argument[kind]()
    if kind in takes_argument:
        raise PolicyError(f"{kind}: needs an argument after the colon; got {text!r}.\n{GRAMMAR}")
    if kind in plain:
        raise PolicyError(f"{kind} takes no argument; got {text!r}.\n{GRAMMAR}")
    if kind.lower() in _AMBIGUOUS:
        raise PolicyError(
            f"{kind!r} means opposite things in different projects: no rematerialization, which is spelt 'everything' here "
            "(all residuals are stored), or full recomputation, which is spelt 'nothing' (nothing but inputs is stored)."
        )
    known = [*plain, *takes_argument, *_JAX_SPELLINGS]
    raise PolicyError(f"{text!r} is not a policy.{did_you_mean(kind, known)}\n{GRAMMAR}")


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def _parse_rule(rule: str) -> tuple[str, str]:
    op, equals, action = rule.partition("=")
    if not equals:
        raise PolicyError(f"ops: a rule is OP=ACTION, such as conv=store; got {rule!r}.")
    return op.strip(), action.strip()


def _parse_count(text: str) -> int | None:
    text = text.strip()
    if text == "sqrt":
        return None
    if not re.fullmatch(r"-?\d+", text):
        raise PolicyError(f"segments: needs a number or sqrt; got {text!r}.{did_you_mean(text, ['sqrt'])}")
    return int(text)


def _parse_values(text: str) -> Values:
    levels, _, program = text.partition("@")
    first, *again = [_split(level) for level in levels.split("/")]
    host = tuple(_parse_position(i[:-1]) for i in first if i.endswith("^"))
    positions = tuple(_parse_position(i.removesuffix("^")) for i in first)
    return Values(positions, program, tuple(tuple(map(_parse_position, level)) for level in again), host)


def _parse_loops(text: str) -> Loops:
    outer, *bodies = text.split("|")
    parts = (tuple(map(_parse_steps, body.split(">"))) for body in bodies)
    return Loops(_parse_part(outer.strip()), tuple(parts))


def _parse_steps(text: str) -> Part:
    found = re.fullmatch(r"(?:(\d+):)?(?:(\d+)\*)?(.*)", text.strip(), re.DOTALL)
    assert found is not None
    steps, run, policy = found.groups()
    if steps is not None and not int(steps):
        raise PolicyError(f"loops: a part has a step or more, as in 8:nothing>dots; got {text.strip()!r}.")
    return Part(_parse_part(policy.strip()), int(run or 0), int(steps or 0))


def _parse_position(text: str) -> int:
    if not text.isdecimal():
        raise PolicyError(f"values: needs whole numbers, such as values:3,17; got {text!r}.")
    return int(text)


def _parse_amount(text: str) -> int | float | str:
    text = text.strip()
    if text.lower() == "fits":
        return "fits"
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        part = float(match.group(1)) / 100
        if not 0 < part <= 1:
            raise PolicyError(f"budget: needs more than 0% and at most 100% of the peak without remat; got {text!r}.")
        return part
    try:
        return parse_size(text)
    except PolicyError:
        raise PolicyError(f"budget: needs a size such as 2GiB, 500MB, 60% or fits; got {text!r}.") from None
