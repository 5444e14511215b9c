"""Embedded smoke tests: 48 original items in each of the six benchmark formats."""
