"""What a device keeps on its disk, and how: whole after a crash at any moment, and bounded."""
