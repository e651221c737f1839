"""stub"""
from typing import Annotated
from annotated_types import Ge, Gt, Interval


class UsageError(ValueError):
    """Something the person who started the run can put right: exit code 2, no traceback.

    The text carries three things: the option and its value; what is required, with the numbers; what to do.
    """


PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
"""0 to 1, both ends included."""
FractionBelowOne = Annotated[float, Interval(ge=0, lt=1)]
"""0 included, 1 excluded: betas, decays, dropout."""
