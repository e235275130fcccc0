"""Merge the trained matrices into the base, and save an ordinary checkpoint.

python examples/lora/merge.py model.safetensors merged
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file
from task import adapted, base
from two_texts import PROSE, windows

net = adapted()
found = net.load_state_dict(load_file(sys.argv[1]), strict=False)
assert not found.unexpected_keys, found.unexpected_keys
merged = net.merge_and_unload()
merged.save_pretrained(sys.argv[2])
rows = windows(PROSE)[-200:]  # no client has them
for name, one in (("base", base()), ("merged", merged)):
    with torch.no_grad():
        print(f"{name}: {next(one.parameters()).dtype}, loss {float(one.eval()(input_ids=rows, labels=rows).loss):.3f}")
