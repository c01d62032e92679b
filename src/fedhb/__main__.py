"""`python -m fedhb`."""

from fedhb.cli.main import entry

entry()
