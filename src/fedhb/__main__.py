"""`python -m fedhb`."""

from fedhb.cli import entry

entry()
