"""What the page of accuracy and bytes says around its tables: the rules, and what was changed of them."""

from __future__ import annotations

PAGE = """\
# Accuracy and bytes

What a codec costs in accuracy, and how many bytes it saves, by rules that were written down before any seed that
decides ran (`benchmarks/accuracy_bytes`, one rule a file):

1. The rounds R of each model come from fp32 alone, on tuning seeds: the first R after which it gains under 0.3 points
   over the next R/4, at most 300.
2. Every chain gets its learning rate from the same grid, on tuning seeds.
3. A chain is selected on seeds A. The figure comes from fresh seeds B, run for that chain only: it is non-inferior if
   the paired one-sided 95 % bound of (codec - fp32) is above -0.5 points at equal rounds. If it fails there, the figure
   is that of a chain fixed in advance (`{fallback}`), or 1: there is no second pick.
4. A run's accuracy is the mean over the models of the last quarter of its rounds, as in rule 1. This rule is not from
   the beginning: see [three protocols](#three-protocols).

The ratio is fp32's payload bytes up over the codec's, frames included, at equal rounds. 20 clients, of which a fifth
takes part in a round; the digits are cut by Dirichlet with alpha 0.3, the source code by package. All clients' test
examples measure each round's model.

Not everything is alike for all models; what takes longer to train got less:

{differing}

"Rates after" is the share of R after which rates are judged. A model without sweeps says nothing of data that differ
more or less, nor of other shares of the clients.

<!-- not run: it prints what is committed; tests/benchmarks runs it -->
```sh
python -m benchmarks.accuracy_bytes --preset committed --json
```

{figures}

`small` takes ten minutes and decides nothing; `full` takes hours, says how many before it begins, and goes on where it
was when it is started again; runs that are committed (`docs/evidence/cells`) are not made again:

<!-- not run: hours -->
```sh
python -m benchmarks.accuracy_bytes --preset full --folder cells
```

## Three protocols

One rule, what a run's accuracy is, was changed after its first result was known. The candidates were changed for the
third protocol; before any decision the cnn's grid of rates and two candidates of the code_lm were changed too. The
digits and the code_lm miss their goals (250 and 100). Of the digits' candidates `eden(0.2)` did not pass on all 24
seeds A. The figures above say which protocol they follow.

The first protocol took the accuracy of the last round's model alone. On 30 seeds B of the digits (3000 to 3029)
`stc(0.04)`, with 103.5 times fewer bytes, came out 0.37 points under fp32 with a bound of -0.58, so its figure was 1.
A round selects 4 of 20 clients with unlike data, so the last model's accuracy jumps by points from round to round: on
seeds A fp16 itself had a standard deviation of 1.8 points. Since the second protocol rule 4 holds, in all steps and
for all chains alike, and seeds B began at 4000. It was changed with that outcome known, so hold both against each
other: on seeds 3000 to 3029 fp16 had a standard deviation of 0.34 points only, and by rule 4 `stc(0.04)` has a bound
of -0.43 there.

By the second protocol the figure of the digits was 103.5 (`stc(0.04)`, bound -0.49 on seeds 4000 to 4029), that of
the cnn 31.4 (`eden(1)`), and that of the code_lm 32.0 (`eden(1)`). The cnn's grid of rates was 0.1 to 0.8 at first,
of which fp32 and most chains did best at 0.1, its edge; it was moved on tuning seeds, before anything was selected.
Of the cnn's first 13 candidates none came near: chains with feedback lost 0.4 to 2.8 points on seeds A, since a
client takes part in 12 of 60 rounds, too few for most of what such a chain leaves out to be sent in the end.

The third protocol has the rules of the second. Its candidates are `eden(b)` below one bit and `randk(0.1, unbiased) >
eden(1)`, which were named before any of them had run on any seed, with `eden(1)` and `stc(0.04)`; its seeds B begin
at 6000. The digits' figure is lower by it than by the second, because `stc(0.04)` is not expected to pass on seeds
B any more: on seeds A its mean less one standard error, less what the bound on B takes, is under -0.5 points, with the
standard deviation pooled over all chains of that step (`selection.py`). The figure of the code_lm is the same by both
protocols. The sweeps of the third protocol have fewer seeds than those of the second had.

All runs are committed: those of the third protocol in `docs/evidence/cells`, the others in its folder `second`.

## The default

A plan without `[uplink]` sends `eden(1)` without feedback. It is non-inferior on seeds B of the code_lm, by the second
protocol on those of the cnn too, and it loses at most 0.23 points on seeds A of the digits. A smaller b sends fewer
bytes on the digits and the cnn. The default stays, because on its first seed A the code_lm lost 0.77 points with
`eden(0.6)` and 1.57 with `eden(0.3)`. Until the second protocol the default was `stc(0.04)`, which was fixed in advance
for a goal of 100 times.
"""
