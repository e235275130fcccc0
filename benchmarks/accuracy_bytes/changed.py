"""What of the protocol was changed after it was first written down, model by model, and before what.

A figure is worth what its rules are, and these were not all there from the beginning: whoever prints one prints this.
"""

from __future__ import annotations

# The third protocol has candidates below one bit, which were named before any of them had run on any seed, beside the
# two chains that the second had decided for, and its seeds B begin at 6000. The task of the code_lm has changed in
# names since the second. One cell of fp32 made again was equal to the last digit, so those of fp32 count too; one of
# `eden(1)` was not, so those of codecs do not. docs/evidence/cells has the runs of the third protocol, its folder
# `second` those of the first two.
PROTOCOL = {"digits": "third", "cnn": "third", "code_lm": "third"}

FIRST = range(3_000, 3_030)  # seeds B of the first protocol
FIRST_BOUND = -0.58  # points, of the chain fixed in advance, there
NAMED = (
    "candidates below one bit came on 26 November 2026, before any of them had run on any seed, and B begins at 6000; "
    "the second protocol's figure is"
)
CHANGED = {
    "digits": (
        f"{NAMED} 103.5 of `stc(0.04)`, with a bound of -0.49 on seeds 4000 to 4029; by the first, which took the last "
        f"round's model alone, it was 1, with a bound of {FIRST_BOUND} on seeds {FIRST[0]} to {FIRST[-1]}"
    ),
    "cnn": f"{NAMED} 31.4 of `eden(1)`; its grid of rates was changed on tuning seeds before anything was selected",
    "code_lm": (
        f"{NAMED} 32.0 of `eden(1)`; two of its 5 candidates there were changed shortly before any of its chains ran, "
        "by what the other models had shown"
    ),
}
