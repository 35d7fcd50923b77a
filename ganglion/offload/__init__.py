"""Memory tiers: pinned host memory and files on disk, for what need not be on the device."""
