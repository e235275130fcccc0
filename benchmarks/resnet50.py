"""The shapes of ResNet-50 (He et al. 2016): 25.56 million parameters in 161 tensors."""

from __future__ import annotations

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks, and channels of their inner convolutions
WIDER = 4  # a block's outer channels over its inner ones


def shapes(share: float = 1.0) -> dict[str, tuple[int, ...]]:
    """Name to shape; of the first tensors until about `share` of all parameters is there.

    >>> import math
    >>> sum(math.prod(shape) for shape in shapes().values())
    25557032
    """
    found: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, out: int, into: int, side: int) -> None:
        found[f"{name}.weight"] = (out, into, side, side)
        found[f"{name}.norm.weight"] = found[f"{name}.norm.bias"] = (out,)

    convolution("conv1", 64, 3, 7)
    into = 64
    for stage, (blocks, inner) in enumerate(STAGES, 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            convolution(f"{name}.conv1", inner, into, 1)
            convolution(f"{name}.conv2", inner, inner, 3)
            convolution(f"{name}.conv3", inner * WIDER, inner, 1)
            if block == 0:
                convolution(f"{name}.downsample", inner * WIDER, into, 1)
            into = inner * WIDER
    found["fc.weight"], found["fc.bias"] = (1000, into), (1000,)
    kept = max(1, round(share * len(found)))
    return dict(list(found.items())[:kept])
