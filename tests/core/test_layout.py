"""Layouts: where tensors lie, and how the vector is cut."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.layout import SEGMENT_FLOATS, Layout, Tensor, differences

shapes = st.dictionaries(
    st.text("abcdef.", min_size=1, max_size=6), st.lists(st.integers(1, 40), min_size=0, max_size=3), max_size=8
)


@given(shapes)
def test_segments_cover_the_vector_without_gap_or_overlap(shapes: dict[str, list[int]]) -> None:
    layout = Layout.of(shapes)
    ends = [0]
    for segment in layout.segments:
        assert segment.start == ends[-1]
        assert segment.size == sum(s.size for s in segment.slices)
        ends.append(segment.stop)
    assert ends[-1] == layout.size


def test_small_tensors_share_a_segment_until_64_mib() -> None:
    third = SEGMENT_FLOATS // 3
    layout = Layout.of(dict.fromkeys("abcd", (third,)))
    assert [len(segment.slices) for segment in layout.segments] == [3, 1]


def test_a_tensor_larger_than_a_segment_is_cut_at_row_borders() -> None:
    layout = Layout.of({"small": (5,), "large": (1000, 40_000), "after": (7,)})
    names = [[s.tensor.name for s in segment.slices] for segment in layout.segments]
    assert names == [["small"], ["large"], ["large"], ["large"], ["after"]]
    for segment in layout.segments:
        assert segment.size <= SEGMENT_FLOATS
        assert all(s.start % s.tensor.row == 0 for s in segment.slices)


def test_a_single_row_larger_than_a_segment_is_cut_all_the_same() -> None:
    layout = Layout.of({"row": (1, 2 * SEGMENT_FLOATS + 1)})
    assert [segment.size for segment in layout.segments] == [SEGMENT_FLOATS, SEGMENT_FLOATS, 1]


@given(shapes)
def test_a_layout_comes_back_from_json_with_its_digest(shapes: dict[str, list[int]]) -> None:
    layout = Layout.of(shapes)
    assert Layout.from_json(layout.to_json()).digest == layout.digest


def test_the_digest_binds_names_shapes_roles_aliases_and_frozen_values() -> None:
    base = [Tensor("w", (2, 3)), Tensor("m", (3,), role="buffer")]
    digests = {
        Layout.build(base).digest,
        Layout.build([Tensor("v", (2, 3)), base[1]]).digest,
        Layout.build([Tensor("w", (3, 2)), base[1]]).digest,
        Layout.build([base[0], Tensor("m", (3,))]).digest,
        Layout.build(base, aliases=[("tied", "w")]).digest,
        Layout.build(base, frozen_digest="00").digest,
    }
    assert len(digests) == 6


def test_roles_have_offsets_of_their_own() -> None:
    layout = Layout.build([Tensor("w", (4,)), Tensor("m", (3,), role="buffer"), Tensor("b", (2,))])
    assert [(t.name, t.offset) for t in layout.tensors] == [("w", 0), ("m", 0), ("b", 4)]
    assert layout.size == 6


def test_a_name_that_stands_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice.*w"):
        Layout.build([Tensor("w", (2,)), Tensor("w", (3,))])


def test_differences_name_what_is_other_missing_added_frozen_tied_or_in_another_order() -> None:
    one = Layout.build([Tensor("w", (2, 3)), Tensor("f", (4,), role="frozen"), Tensor("b", (2,))], frozen_digest="1")

    def named(*tensors: Tensor, frozen: str = "1", aliases: tuple[tuple[str, str], ...] = ()) -> str:
        return differences(Layout.build(tensors, aliases, frozen), one)

    w, f, b = one.tensors
    assert differences(one, one) == ""
    assert named(w, b, frozen="") == "f is missing"
    assert named(w, f, b, Tensor("x", ())) == "x is added"
    assert named(w, replace(f, role="trained"), b, frozen="") == "f is trained instead of frozen"
    assert (
        named(w, f, replace(b, dtype="float64", shape=())) == "b is one number instead of 2, float64 instead of float32"
    )
    assert named(w, f, b, frozen="2") == "values that training leaves alone differ in one or more of f"
    assert named(b, f, w) == "the tensors stand in another order"
    assert named(w, f, b, aliases=(("v", "w"),)) == "tied otherwise: v"
    many = Layout.of({f"{'n' * 100}{n}": (1,) for n in range(40)})
    assert differences(many, one).endswith("; and 38 more")
    assert len(differences(many, one)) < 400


def test_of_many_frozen_tensors_those_whose_values_differ_are_named_and_no_digest_changes() -> None:
    tensors = [Tensor("w", (2,)), *(Tensor(f"f{n}", (4,), role="frozen") for n in range(9)),
               Tensor("order", (3,), "int64", "buffer")]  # fmt: skip

    def made(digest: str, *values: str) -> Layout:
        return Layout.build(tensors, frozen_digest=digest, frozen_values=values)

    sums = [f"{n:08x}" for n in range(10)]
    one, other = made("1", *sums), made("2", *sums[:7], "ff", sums[8], "fe")
    assert differences(other, one) == "f7 has other values; order has other values"
    assert one.digest == made("1").digest, "they name what the digest has found, and are no part of it"
    assert Layout.from_json(json.loads(one.text)) == one
    unknown = "values that training leaves alone differ in one or more of f0, f1, f2, f3, f4 and 5 more"
    assert {differences(*pair) for pair in [(made("2"), one), (other, made("1")), (made("2", "a"), one)]} == {unknown}
    assert differences(made("2", *sums), one) == unknown, "checksums that agree name nothing"
