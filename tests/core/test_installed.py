"""What other packages bring by entry points: found by name, imported when requested, and never in place of our own."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from thinwire.compression.base import Coder, Quantizer
from thinwire.compression.codecs import admit
from thinwire.compression.codecs.identity_fp16_bf16 import Fp16, Identity
from thinwire.core.errors import CodecError
from thinwire.core.registry import Registry

GROUP = "thinwire.things"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `elsewhere` whose `mine`, `square` and `broken` are entry points of the group."""
    module = ModuleType("elsewhere")
    module.mine = "theirs"  # type: ignore[attr-defined]  # a made module
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    found = [EntryPoint(name, f"elsewhere:{name}", GROUP) for name in ("mine", "square", "broken")]
    monkeypatch.setattr("thinwire.core.registry.entry_points", lambda group: found if group == GROUP else [])
    return module


@pytest.mark.usefixtures("elsewhere")
def test_what_is_installed_is_found_by_name_beside_our_own() -> None:
    shapes: Registry[str] = Registry("shape", group=GROUP)
    shapes.add("square", "ours")
    assert shapes.find("mine") == "theirs"
    assert shapes.find("square") == "ours"
    assert list(shapes) == ["square", "mine", "broken"]
    assert len(shapes) == 3
    assert "mine" in shapes


@pytest.mark.usefixtures("elsewhere")
def test_what_does_not_import_is_refused_by_name_and_no_text_of_it_is_told() -> None:
    with pytest.raises(CodecError, match="'broken' of elsewhere:broken does not import") as caught:
        Registry[str]("shape", group=GROUP).find("broken")
    assert "AttributeError" in caught.value.why
    assert "has no attribute" not in str(caught.value)


@pytest.mark.usefixtures("elsewhere")
def test_a_registry_without_a_group_knows_its_own_only() -> None:
    assert list(Registry[str]("shape")) == []
    with pytest.raises(CodecError, match="no shape 'mine'"):
        Registry[str]("shape").find("mine")


@pytest.mark.parametrize(
    ("base", "parts", "said"),
    [
        (object, {}, "no subclass of Quantizer, Sparsifier or Compressor"),
        (Coder, {"examples": ("mine",), "spec": "mine"}, "no subclass of Quantizer, Sparsifier or Compressor"),
        (Quantizer, {}, "has no bits, check, dequantize, kind, quantize, spec, examples"),
        (Fp16, {"examples": ("other",)}, "other"),
        (Fp16, {"examples": ()}, "[]"),
    ],
)
def test_what_is_no_step_of_a_chain_is_refused(
    elsewhere: ModuleType, base: type, parts: dict[str, object], said: str
) -> None:
    elsewhere.mine = type("Mine", (base,), parts)  # type: ignore[attr-defined]  # a made module
    with pytest.raises(CodecError) as caught:
        Registry("codec", GROUP, admit).find("mine")
    assert said in caught.value.why


def test_an_installed_step_is_one_like_ours(elsewhere: ModuleType) -> None:
    elsewhere.mine = type("Mine", (Identity,), {"examples": ("mine",)})  # type: ignore[attr-defined]  # a made module
    assert Registry("codec", GROUP, admit).find("mine").role == "quantizer"
