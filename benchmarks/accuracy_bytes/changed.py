"""What of the protocol was changed after it was first written down, model by model, and before what.

A figure is worth what its rules are, and these were not all there from the beginning: whoever prints one prints this.
"""

from __future__ import annotations

PROTOCOL = "third"

FIRST = range(3_000, 3_030)  # seeds B of the first protocol
FIRST_BOUND = -0.58  # points, of the chain fixed in advance, there
THIRD = (
    "the second had decided on seeds 4000 to 4029; the third has candidates below one bit, the two chains of before, "
    "and fresh seeds B from 6000 on"
)
CHANGED = {
    "digits": (
        f"by the first, which took the last round's model alone, the figure was 1: `stc(0.04)` had a bound of "
        f"{FIRST_BOUND} on seeds {FIRST[0]} to {FIRST[-1]}; since then accuracy is the mean of the last quarter, and B "
        "begins at 4000; " + THIRD
    ),
    "cnn": (
        "no seed of its A or B had run by the first; its grid of rates was changed on tuning seeds, and 5 of its 18 "
        "candidates came after a look at seeds A, before any seed B; " + THIRD
    ),
    "code_lm": (
        "no seed of its A or B had run by the first; two of its 5 candidates were changed shortly before any of its "
        "chains ran, by what the other models had shown; " + THIRD
    ),
}
