"""What a device's owner lets others do with it (`policy`): every ask is held against that before anything is loaded."""
