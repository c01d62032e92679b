"""`python -m fedhb`."""

from fedhb.cli import main

main()
