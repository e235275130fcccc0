"""A package of somebody else, installed in a folder, that brings one thing to Thinwire by entry point."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, source: str, group: str, entry: str) -> None:
    """`entry` is NAME = mypkg:CLASS, found under `group` by whoever has the folder on its path."""
    (folder / "mypkg.py").write_text(source)
    info = folder / "mypkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
