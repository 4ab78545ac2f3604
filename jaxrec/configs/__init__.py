"""Named configs: one module each, whose function of no arguments returns a `Config`."""
