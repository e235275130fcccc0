"""What columns hold: text and integers that may come from strangers are made to fit before a database sees them."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Boolean, Double, Integer, MetaData, Text, TypeDecorator
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase

LARGEST = 2**63 - 1
LONGEST = 4000  # letters; the journal has all of it


class Words(TypeDecorator[str]):
    """Text that may come from a device: cut at `longest`; NUL and halves of surrogate pairs are replaced."""

    impl = Text
    cache_ok = True

    def __init__(self, longest: int = LONGEST) -> None:
        super().__init__()
        self.longest = longest

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value[: self.longest].encode("utf-8", "replace").decode().replace("\0", "?")


class Whole(TypeDecorator[int]):
    """An integer that may come from a device: held at the ends of 64 bits."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, _dialect: Dialect) -> int | None:
        return None if value is None else max(-LARGEST, min(LARGEST, value))


Counter = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only in a column of type INTEGER


class Base(DeclarativeBase):
    """All tables; names of indexes and constraints are the same on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Words,
        int: Whole,
        float: Double,
        bool: Boolean,
        dict[str, Any]: JSON,
        list[Any]: JSON,
    }
