"""Draw the figures of reports; only this package imports matplotlib."""
